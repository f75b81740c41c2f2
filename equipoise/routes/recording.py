"""`Recording`: one sample as a wire or file holds it, nothing mapped and nothing judged yet.

Readers only decode: they yield recordings. `interpret.py` turns recordings into `SampleRoutes` (layer map, missing
rows, turns, offsets), and the doctor looks at recordings themselves, because what is wrong with a dump is lost once it
is mapped.

Knows shapes only. Does not know any format, nor what an id means.
"""

from dataclasses import dataclass

import numpy as np

from equipoise.core import RoutesError
from equipoise.core.value import Value, frozen_array, require_int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recording(Value):
    """One sample, or one turn of one sample: turns of a sample share its name and follow each other."""

    name: str
    """What the dump calls the sample: its id where it has one, else "line 3", "choice 0 of line 3", "row 7"."""
    rows: np.ndarray
    """[rows, layers on the wire, K] integers exactly as decoded, any integer dtype."""
    start: int = 0
    """Token of the sample that the first row belongs to (`routed_experts_prompt_start`, `routed_experts_start_len`)."""
    num_tokens: int | None = None
    """Tokens of the sample up to the end of this turn, prompt and response; None where the dump does not say."""
    tokens: np.ndarray | None = None
    """Token ids of the sample up to the end of this turn, where the dump has them."""
    padding: np.ndarray | None = None
    """[rows] bool, True for rows that were forwarded but belong to no token."""
    layer_numbers: tuple[int, ...] | None = None
    """Global layer numbers of the wire's layer axis where the dump names them; None: to be mapped by its length."""
    weight_version: str = ""
    """The engine's name for the weights that made these rows; empty where it is not recorded."""

    def __post_init__(self) -> None:
        rows = np.asarray(self.rows)
        if rows.ndim != 3 or rows.dtype.kind not in "iu":
            raise RoutesError(
                f"sample {self.name!r}: routes must be integers of shape [rows, layers, top-k], "
                f"got {rows.dtype} of shape {rows.shape}"
            )
        object.__setattr__(self, "rows", frozen_array(rows))
        require_int(f"sample {self.name!r}: start", self.start, low=0, error=RoutesError)
        if self.num_tokens is not None:
            require_int(f"sample {self.name!r}: num_tokens", self.num_tokens, low=0, error=RoutesError)
        if self.padding is not None and (self.padding.dtype != np.bool_ or self.padding.shape != rows.shape[:1]):
            raise RoutesError(f"sample {self.name!r}: padding must be bool of shape {rows.shape[:1]}")
        if self.layer_numbers is not None and len(self.layer_numbers) != rows.shape[1]:
            raise RoutesError(
                f"sample {self.name!r}: {len(self.layer_numbers)} layer numbers for {rows.shape[1]} layers on the wire"
            )

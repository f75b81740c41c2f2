"""The shape of a Mixture-of-Experts model: the figures that loads, bytes and seconds need.

Published configurations are data files in `presets/models`, one per model, each with its source; `from_config` reads
the keys of HF `config.json` files.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

from equipoise.core.errors import TopologyError
from equipoise.core.value import Value, require_int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelShape(Value):
    """The figures of one MoE model. Layers are numbered globally, dense ones included, from 0."""

    name: str
    experts: int
    """Routed experts per MoE layer."""
    top_k: int
    """Experts each token chooses in each MoE layer."""
    layer_numbers: tuple[int, ...]
    """Global numbers of the MoE layers, ascending. Example: (1, 2, 3) for four layers, the first one dense."""
    hidden_layers: int
    """All decoder layers, dense ones included, MTP layers not."""
    hidden: int
    """Width of the residual stream."""
    expert_width: int
    """Inner width of one routed expert."""
    shared_experts: int = 0
    """Experts every token passes, each of `expert_width`."""
    attention_params: int = 0
    """Parameters of one layer's attention projections."""
    attention_width: int = 0
    """Heads times (query-key width + value width): what one score and its use cost per pair of tokens."""
    mtp_layers: int = 0
    """Multi-token-prediction layers; they are never part of recorded routes."""
    hash_layers: tuple[int, ...] = ()
    """Global numbers of MoE layers whose routing is a function of the token id alone."""
    expert_bias: bool = False
    """Whether experts carry bias vectors."""
    weight_bytes: int = 2
    """Bytes of one weight as the training kernels read it (2: bf16)."""
    source: str = ""
    """Source of the figures."""

    def __post_init__(self) -> None:
        for name, low in _LOWEST.items():
            value = require_int(f"model {self.name!r}: {name}", getattr(self, name), low=low, error=TopologyError)
            object.__setattr__(self, name, value)
        if self.top_k > self.experts:
            raise TopologyError(f"model {self.name!r}: top_k is {self.top_k}; there are only {self.experts} experts")
        for name in ("layer_numbers", "hash_layers"):
            object.__setattr__(self, name, _entries(f"model {self.name!r}: {name}", getattr(self, name)))
        numbers = self.layer_numbers
        if not numbers:
            raise TopologyError(f"model {self.name!r} has no MoE layer; give at least one layer number")
        if list(numbers) != sorted(set(numbers)) or numbers[0] < 0 or numbers[-1] >= self.hidden_layers:
            raise TopologyError(
                f"model {self.name!r}: layer_numbers must ascend within 0..{self.hidden_layers - 1}, got {numbers}"
            )
        strangers = sorted(set(self.hash_layers) - set(numbers))
        if strangers:
            raise TopologyError(f"model {self.name!r}: hash_layers {strangers} are not MoE layers; remove them")

    @property
    def layers(self) -> int:
        """Number of MoE layers, the L axis of every array."""
        return len(self.layer_numbers)

    @property
    def expert_params(self) -> int:
        """Parameters of one routed expert: gate, up and down projections, and biases where there are any."""
        bias = 2 * self.expert_width + self.hidden if self.expert_bias else 0
        return 3 * self.hidden * self.expert_width + bias

    @property
    def expert_bytes(self) -> int:
        """Bytes of one routed expert as the kernels read it."""
        return self.expert_params * self.weight_bytes

    @property
    def row_flops(self) -> int:
        """Floating-point operations of one row in the forward pass of one expert."""
        return 6 * self.hidden * self.expert_width

    @property
    def row_bytes(self) -> int:
        """Bytes of one row on the wire: one hidden state."""
        return self.hidden * self.weight_bytes

    @classmethod
    def preset(cls, name: str, /, **figures: Any) -> "ModelShape":
        """Build a published model by name; any figure can be overridden, `layers` (a count) too.

        Args:
            name: for example "qwen3-30b-a3b"; upper case and underscores are accepted
            figures: fields of this class, or `layers`
        """
        known = preset_names()
        key = name.lower().replace("_", "-")
        if key not in known:
            raise TopologyError(f"no model preset {name!r}; known: {', '.join(known)}, or give a config.json")
        text = (resources.files("equipoise.core") / "presets" / "models" / f"{key}.json").read_text()
        data = json.loads(text)
        shape = cls.from_config(data["config"], name=key)
        shape = replace(shape, source=data["source"])
        return shape.replace(**figures) if figures else shape

    def replace(self, **figures: Any) -> "ModelShape":
        """Return a copy with some figures changed; `layers=n` keeps the leading dense layers and n MoE layers."""
        figures = dict(figures)
        layers = figures.pop("layers", None)
        unknown = sorted(set(figures) - {f.name for f in fields(self)})
        if unknown:
            names = ", ".join(sorted([f.name for f in fields(self)] + ["layers"]))
            raise TopologyError(f"model {self.name!r} has no figure {unknown[0]!r}; known: {names}")
        if layers is not None:
            if "layer_numbers" in figures:
                raise TopologyError("give layers or layer_numbers, not both")
            count = require_int("layers", layers, low=1, error=TopologyError)
            # Continued one by one if the model has fewer MoE layers.
            kept = self.layer_numbers[:count]
            figures["layer_numbers"] = kept + tuple(range(kept[-1] + 1, kept[-1] + 1 + count - len(kept)))
            figures.setdefault("hash_layers", tuple(n for n in self.hash_layers if n in figures["layer_numbers"]))
        if figures.get("layer_numbers"):
            figures["layer_numbers"] = _entries("layer_numbers", figures["layer_numbers"])
            figures.setdefault("hidden_layers", max(figures["layer_numbers"]) + 1)
        if "experts" in figures and "top_k" not in figures:
            figures["top_k"] = min(self.top_k, require_int("experts", figures["experts"], low=1, error=TopologyError))
        return replace(self, **figures)

    def figures(self) -> dict[str, Any]:
        """Return every field as plain JSON content, for `from_figures`."""
        values = ((f.name, getattr(self, f.name)) for f in fields(self))
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values}

    @classmethod
    def from_figures(cls, figures: Mapping[str, Any]) -> "ModelShape":
        """Build the model that `figures` describes, or raise naming what is missing, unknown or of a wrong type."""
        known = {f.name for f in fields(cls)}
        wrong = sorted(set(figures) ^ known)
        if wrong:
            state = "unknown" if wrong[0] in figures else "missing"
            raise TopologyError(f"figures of a model: {wrong[0]!r} is {state}; they are {', '.join(sorted(known))}")
        for name, kind in (("name", str), ("source", str), ("expert_bias", bool)):
            if not isinstance(figures[name], kind):
                raise TopologyError(f"figures of a model: {name} must be {kind.__name__}, got {figures[name]!r}")
        return cls(**figures)

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | str | Path, *, name: str | None = None) -> "ModelShape":
        """Read a HF `config.json`, given as a path or as its content."""
        if isinstance(config, str | Path):
            return cls._from_config_file(Path(config), name)
        text_config = config.get("text_config")
        figures = {**config, **text_config} if isinstance(text_config, Mapping) else dict(config)
        title = name or str(figures.get("_name_or_path") or figures.get("model_type") or "model")
        hidden_layers = _figure(figures, title, "num_hidden_layers", high=_MOST_LAYERS)
        return cls(
            name=title,
            experts=_figure(figures, title, "num_experts", "n_routed_experts", "num_local_experts"),
            top_k=_figure(figures, title, "num_experts_per_tok", "moe_topk", "moe_router_topk"),
            layer_numbers=_moe_layer_numbers(figures, title, hidden_layers),
            hidden_layers=hidden_layers,
            hidden=_figure(figures, title, "hidden_size"),
            expert_width=_figure(figures, title, "moe_intermediate_size", "intermediate_size"),
            shared_experts=_count(figures, title, "n_shared_experts", "num_shared_experts"),
            **_attention(figures, title),
            mtp_layers=_count(figures, title, "num_nextn_predict_layers"),
            hash_layers=tuple(range(_count(figures, title, "num_hash_layers", high=hidden_layers))),
            expert_bias=figures.get("model_type") == "gpt_oss",
            source="config.json",
        )

    @classmethod
    def _from_config_file(cls, path: Path, name: str | None) -> "ModelShape":
        if path.is_dir():
            path = path / "config.json"
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise TopologyError(f"no model config at {path}; give a preset name or a HF config.json") from error
        except (ValueError, OSError, RecursionError) as error:
            raise TopologyError(f"{path} is not a readable JSON file: {error}") from error
        if not isinstance(content, Mapping):
            raise TopologyError(f"{path} holds a {type(content).__name__}; a HF config.json holds an object")
        shape = cls.from_config(content, name=name or path.resolve().parent.name)
        return replace(shape, source=str(path))


_MOST_LAYERS = 10_000
"""Above every real model; a broken file must not produce a list of 10^30 layer numbers."""

_LOWEST = {
    "experts": 1,
    "top_k": 1,
    "hidden_layers": 1,
    "hidden": 1,
    "expert_width": 1,
    "shared_experts": 0,
    "attention_params": 0,
    "attention_width": 0,
    "mtp_layers": 0,
    "weight_bytes": 1,
}


def _entries(name: str, value: Any) -> tuple[int, ...]:
    """Return a list of layer numbers as a tuple; their range is checked against the model's layers."""
    if not isinstance(value, list | tuple):
        raise TopologyError(f"{name} must be a list, got {value!r}")
    return tuple(require_int(name, n, low=-1, error=TopologyError) for n in value)


def preset_names() -> list[str]:
    """Return the names of all model presets, sorted."""
    folder = resources.files("equipoise.core") / "presets" / "models"
    return sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json"))


def _figure(figures: Mapping[str, Any], title: str, *keys: str, low: int = 1, high: int | None = None) -> int:
    """Return the figure under the first of `keys` that the config has, or raise an error that names them."""
    for key in keys:
        if figures.get(key) is not None:
            label = f"model {title!r}: config key {key!r}"
            return require_int(label, figures[key], low=low, high=high, error=TopologyError)
    raise TopologyError(f"model {title!r}: config.json has none of the keys {', '.join(keys)}; is it an MoE model?")


def _count(figures: Mapping[str, Any], title: str, *keys: str, high: int | None = None) -> int:
    """Return a figure that a config may leave out, which means 0."""
    given = [key for key in keys if figures.get(key) is not None]
    return _figure(figures, title, *given, low=0, high=high) if given else 0


def _moe_layer_numbers(figures: Mapping[str, Any], title: str, hidden_layers: int) -> tuple[int, ...]:
    """Find the MoE layers: by a dense prefix, a stride, a list of dense layers, or a flag per layer."""
    flags = figures.get("moe_layer_freq")
    if isinstance(flags, list):
        if len(flags) != hidden_layers or any(flag not in (0, 1) for flag in flags):
            raise TopologyError(f"model {title!r}: moe_layer_freq must be one 0 or 1 per layer, or a stride")
        return tuple(n for n, flag in enumerate(flags) if flag)
    first = _count(figures, title, "first_k_dense_replace")
    dense = figures.get("mlp_only_layers")
    if not isinstance(dense, list | None):
        raise TopologyError(f"model {title!r}: mlp_only_layers must be a list of layer numbers, got {dense!r}")
    for number in dense or ():
        require_int(f"model {title!r}: an entry of mlp_only_layers", number, low=0, error=TopologyError)
    # decoder_sparse_step counts layers from 1, moe_layer_freq from 0.
    offset = 1 if figures.get("decoder_sparse_step") else 0
    stride = _count(figures, title, "decoder_sparse_step" if offset else "moe_layer_freq") or 1
    return tuple(n for n in range(first, hidden_layers) if n not in (dense or ()) and (n + offset) % stride == 0)


def _attention(figures: Mapping[str, Any], title: str) -> dict[str, int]:
    """Return parameters and width of one layer's attention, latent or grouped-query."""
    hidden, heads = (_figure(figures, title, key) for key in ("hidden_size", "num_attention_heads"))
    rank, q_rank = (_count(figures, title, key) for key in ("kv_lora_rank", "q_lora_rank"))
    if rank:
        # Widths of one head: query and key without and with rotation, and value.
        keys = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        nope, rope, value = (_figure(figures, title, key) for key in keys)
        query = heads * (nope + rope)
        params = hidden * q_rank + q_rank * query if q_rank else hidden * query
        params += hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden
        return {"attention_params": params, "attention_width": heads * (nope + rope + value)}
    width = hidden // heads if figures.get("head_dim") is None else _figure(figures, title, "head_dim")
    kv_heads = _count(figures, title, "num_key_value_heads") or heads
    return {"attention_params": 2 * hidden * (heads + kv_heads) * width, "attention_width": 2 * heads * width}

"""The shape of a Mixture-of-Experts model: the figures that loads, bytes and seconds need.

Published configurations are data files in `presets/models`, one per model, each with its source; `from_config` reads
the keys of HF `config.json` files.
"""

import json
from collections.abc import Iterator, Mapping
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
        if figures.get("enable_moe_block") is False or figures.get("model_type") == "doge":
            raise TopologyError(f"model {title!r}: this config has no routed experts; give that of an MoE model")
        if figures.get("num_hidden_layers") is None and _hybrid_blocks(figures):
            figures["num_hidden_layers"] = len(_hybrid_blocks(figures))
        hidden_layers = _figure(figures, title, "num_hidden_layers", high=_MOST_LAYERS)
        kinds = figures.get("mlp_layer_types")
        hashed = [n for n, kind in enumerate(kinds) if kind == "hash_moe"] if isinstance(kinds, list) else []
        return cls(
            name=title,
            experts=_figure(figures, title, "num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"),
            top_k=_figure(figures, title, *_TOP_K),
            layer_numbers=_moe_layer_numbers(figures, title, hidden_layers),
            hidden_layers=hidden_layers,
            hidden=_figure(figures, title, "hidden_size"),
            expert_width=_figure(figures, title, "moe_intermediate_size", "intermediate_size"),
            shared_experts=_count(figures, title, "n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
            **_attention(figures, title),
            mtp_layers=_count(figures, title, "num_nextn_predict_layers"),
            hash_layers=tuple(hashed or range(_count(figures, title, "num_hash_layers", high=hidden_layers))),
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
            known = ", ".join(preset_names())
            raise TopologyError(
                f"no model config at {path}, and no preset of that name; give one of {known}, a config.json, or the "
                "folder of a checkpoint"
            ) from error
        except (ValueError, OSError, RecursionError) as error:
            raise TopologyError(f"{path} is not a readable JSON file: {error}") from error
        if not isinstance(content, Mapping):
            raise TopologyError(f"{path} holds a {type(content).__name__}; a HF config.json holds an object")
        shape = cls.from_config(content, name=name or path.resolve().parent.name)
        return replace(shape, source=str(path))


_TOP_K = ("num_experts_per_tok", "moe_topk", "moe_router_topk", "num_experts_per_token", "moe_k", "top_k_experts")
"""What families call the number of experts per token."""
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


_DENSE_FIRST = (
    "afmoe axk1 axk2 deepseek_v3 deepseek_v32 ernie4_5_moe ernie4_5_vl_moe ernie4_5_vl_moe_text exaone_moe glm4_moe "
    "glm4_moe_lite glm4v_moe glm4v_moe_text glm5_next glm5_next_text glm_moe_dsa hy_v3 hy_v4 jamba kimi_linear laguna "
    "lfm2_moe mimo_v2_flash nemotron_h step3p5 step3p7"
)
"""Families of transformers 5.17 in which some layers are dense although no key of the config says so."""


def _moe_layer_numbers(figures: Mapping[str, Any], title: str, hidden_layers: int) -> tuple[int, ...]:
    """Find the MoE layers: by what the config says of every layer, else by dense layers in front and strides."""
    listed = dict(_listed_layers(figures, title, hidden_layers))
    if len(set(listed.values())) > 1:
        raise TopologyError(f"model {title!r}: {' and '.join(listed)} name different MoE layers; remove all but one")
    if listed:
        return next(iter(listed.values()))
    # (step, which layers of each step are MoE); some count layers from 1.
    strides = [
        (_count(figures, title, key), -1)
        for key in ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval")
    ]
    strides.append((_count(figures, title, "moe_layer_freq"), 0))
    strides.append((_count(figures, title, "expert_layer_period"), _count(figures, title, "expert_layer_offset")))
    first = [_count(figures, title, key) for key in _FIRST if figures.get(key) is not None]
    dense = figures.get("mlp_only_layers")
    if not isinstance(dense, list | None):
        raise TopologyError(f"model {title!r}: mlp_only_layers must be a list of layer numbers, got {dense!r}")
    for number in dense or ():
        require_int(f"model {title!r}: an entry of mlp_only_layers", number, low=0, error=TopologyError)
    if (
        not first
        and dense is None
        and not any(step for step, _ in strides)
        and str(figures.get("model_type")) in _DENSE_FIRST.split()
    ):
        raise TopologyError(
            f"model {title!r}: some layers of {figures['model_type']} are dense, and this config does not say which; "
            f"add mlp_layer_types (one 'dense' or 'sparse' per layer) or {_FIRST[0]}"
        )
    end = figures.get("moe_layer_end_index")
    last = hidden_layers - 1 if end in (None, -1) else _figure(figures, title, "moe_layer_end_index")
    return tuple(
        n
        for n in range(max(first, default=0), last + 1)
        if n not in (dense or ()) and all((n - offset) % step == 0 for step, offset in strides if step)
    )


_FIRST = ("first_k_dense_replace", "num_dense_layers", "dense_mlp_idx", "moe_layer_start_index")
"""Keys that give the number of dense layers in front."""
_KINDS = {"dense": False, "sparse": True, "moe": True, "hash_moe": True, "mlp": False}
"""Entries of `mlp_layer_types` and `layers_block_type`, and whether they are MoE layers; those of attention are not."""


def _listed_layers(figures: Mapping[str, Any], title: str, hidden_layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the keys that say of every layer whether it is MoE, with the MoE layers by each."""
    kinds = figures.get("mlp_layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != hidden_layers or any(kind not in _KINDS for kind in kinds):
            raise TopologyError(
                f"model {title!r}: mlp_layer_types must have one of {', '.join(_KINDS)} per layer for {hidden_layers} "
                f"layers, got {kinds!r}"
            )
        yield "mlp_layer_types", tuple(n for n, kind in enumerate(kinds) if _KINDS[kind])
    flags = figures.get("moe_layer_freq")
    if isinstance(flags, list):
        if len(flags) != hidden_layers or any(flag not in (0, 1) for flag in flags):
            raise TopologyError(f"model {title!r}: moe_layer_freq must be one 0 or 1 per layer, or a stride")
        yield "moe_layer_freq", tuple(n for n, flag in enumerate(flags) if flag)
    for key in ("moe_layers", "moe_layers_enum"):
        numbers = figures.get(key)
        if isinstance(numbers, str):
            numbers = [int(part) if part.strip().isdecimal() else part for part in numbers.split(",")]
        if numbers is not None:
            # Those past the last layer are of MTP layers.
            yield key, tuple(n for n in _entries(f"model {title!r}: {key}", numbers) if n < hidden_layers)
    blocks = _hybrid_blocks(figures)
    if "moe" in blocks:
        yield "layers_block_type", tuple(n for n, block in enumerate(blocks) if block == "moe")


def _hybrid_blocks(figures: Mapping[str, Any]) -> list[str]:
    """Return the kinds of layers of a hybrid model in which attention and MLPs are layers of their own, else []."""
    blocks = figures.get("layers_block_type") or figures.get("hybrid_override_pattern")
    if isinstance(blocks, str):
        blocks = ["moe" if letter == "E" else letter for letter in blocks]
    return blocks if isinstance(blocks, list) else []


def _attention(figures: Mapping[str, Any], title: str) -> dict[str, int]:
    """Return parameters and width of one layer's attention, latent or grouped-query."""
    hidden, heads = (_figure(figures, title, key) for key in ("hidden_size", "num_attention_heads"))
    rank, q_rank = (_count(figures, title, key) for key in ("kv_lora_rank", "q_lora_rank"))
    if rank:
        # Widths of one head: query and key without and with rotation, and value.
        keys = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        nope, rope, value = (_figure(figures, title, key, low=0) for key in keys)
        query = heads * (nope + rope)
        params = hidden * q_rank + q_rank * query if q_rank else hidden * query
        params += hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden
        return {"attention_params": params, "attention_width": heads * (nope + rope + value)}
    width = hidden // heads if figures.get("head_dim") is None else _figure(figures, title, "head_dim")
    kv_heads = _count(figures, title, "num_key_value_heads") or heads
    return {"attention_params": 2 * hidden * (heads + kv_heads) * width, "attention_width": 2 * heads * width}

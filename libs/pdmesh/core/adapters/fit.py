"""Decides from a LoRA adapter's settings and tensor shapes whether a model can use the adapter.

An engine copies an adapter's tensors into slots of the model's sizes, and hardly checks them. So an
adapter that does not fit the model must not reach the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

Shapes = Mapping[str, tuple[int, ...]]  # the shapes of tensors, by name

SETTINGS: Final = "adapter_config.json"
# PEFT's settings that change what an adapter computes, and that vLLM does not implement.
_UNSUPPORTED: Final = (
    "use_dora", "lora_bias", "modules_to_save", "alora_invocation_tokens", "layer_replication",
    "use_bdlora", "use_qalora", "trainable_token_indices", "target_parameters",
)  # fmt: skip
# The values of `init_lora_weights` that change no weight of the base model. An adapter with another
# value (PiSSA, OLoRA, CorDA, LoftQ) needs a changed base model, which the mesh does not serve.
_PLAIN_INITS: Final = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")
_EMBEDDINGS: Final = ("embed_tokens", "wte", "wpe", "word_embeddings")  # no linear layers
_PREFIX: Final = "base_model.model."
_SIDES: Final = {".lora_A.weight": 0, ".lora_B.weight": 1}


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """The content of an adapter's files. `settings` is adapter_config.json."""

    digest: str
    num_bytes: int
    settings: Mapping[str, Any] = field(repr=False)  # parsed JSON
    shapes: Shapes = field(repr=False)

    @property
    def rank(self) -> int:
        """The highest LoRA rank of the adapter's modules."""
        return max((min(shape) for shape in self.shapes.values() if shape), default=0)


def misfit(facts: AdapterFacts, max_rank: int, base: Shapes | None) -> str:
    """Why the adapter cannot be used. The result is empty if it can be used.

    `base` holds the shapes of the model's weights. It is None for quantised weights, because their
    shapes do not show the sizes of the layers.
    """
    if why := _unsupported(facts.settings) or _wrong_rank(facts.settings, max_rank):
        return f"{SETTINGS}: {why}"
    modules: dict[str, list[tuple[int, ...] | None]] = {}
    for name, shape in facts.shapes.items():
        side = next((s for s in _SIDES if name.endswith(s)), None)
        if side is None or not name.startswith(_PREFIX):
            return f"{name[:120]} is no part of a LoRA adapter of linear layers"
        module = name.removeprefix(_PREFIX).removesuffix(side)
        if module.rsplit(".", 1)[-1] in _EMBEDDINGS:
            return f"{name[:120]} is no part of a LoRA adapter of linear layers"
        modules.setdefault(module, [None, None])[_SIDES[side]] = shape
    if not modules:
        return "it has no tensors"
    found = (_misfit_of(m, a, b, max_rank, base) for m, (a, b) in sorted(modules.items()))
    return next(filter(None, found), "")


def _unsupported(settings: Mapping[str, Any]) -> str:
    if settings.get("peft_type") != "LORA":
        return f"it is not a LoRA adapter: peft_type is {str(settings.get('peft_type'))[:40]}"
    if named := [name for name in _UNSUPPORTED if settings.get(name)]:
        return f"{named[0]} is not supported"
    if settings.get("bias", "none") != "none":
        return "bias is not supported"
    init = settings.get("init_lora_weights")
    if isinstance(init, str) and init.lower() not in _PLAIN_INITS:
        return (
            f"init_lora_weights {init[:40]!r} is not supported: the adapter is for a changed "
            "model; save it with PEFT's path_initial_model_for_weight_conversion"
        )
    return _wrong_targets(settings.get("target_modules"))


def _wrong_targets(targets: object) -> str:
    is_list = isinstance(targets, list) and all(isinstance(target, str) for target in targets)
    if targets and (is_list or isinstance(targets, str)):
        return ""
    return "target_modules must be a string, or a list of strings, and not empty"


def _wrong_rank(settings: Mapping[str, Any], max_rank: int) -> str:
    if not _is_positive(settings.get("lora_alpha")):
        return "lora_alpha must be a positive number"
    for name, is_right, what in (
        ("rank_pattern", _is_rank, "a positive integer"),
        ("alpha_pattern", _is_positive, "a positive number"),
    ):
        pattern = settings.get(name) or {}
        if not isinstance(pattern, dict) or not all(map(is_right, pattern.values())):
            return f"{name} must give {what} for each name"
    if not _is_rank(settings.get("r")):
        return "r must be a positive integer"
    ranks = {"r": settings["r"]} | {
        f"rank_pattern.{name}": rank for name, rank in (settings.get("rank_pattern") or {}).items()
    }
    name, rank = max(ranks.items(), key=lambda item: item[1])
    if rank > max_rank:
        return f"{name[:80]} is {rank}; the highest rank here is {max_rank} (MAX_LORA_RANK)"
    return ""


def _misfit_of(
    module: str,
    a: tuple[int, ...] | None,
    b: tuple[int, ...] | None,
    max_rank: int,
    base: Shapes | None,
) -> str:
    if a is None or b is None:
        return f"{module} lacks lora_{'A' if a is None else 'B'}"
    if len(a) != 2 or len(b) != 2 or a[0] != b[1] or not all((*a, *b)):
        return f"{module}: lora_A {list(a)} and lora_B {list(b)} do not fit together"
    if a[0] > max_rank:
        return f"{module} has rank {a[0]}; the highest here is {max_rank} (MAX_LORA_RANK)"
    if base is None:
        return ""
    weight = base.get(f"{module}.weight")
    if weight is None:
        return f"the model has no layer {module}"
    if weight != (b[0], a[1]):
        return f"{module} is {list(weight)} in the model, and {[b[0], a[1]]} in the adapter"
    return ""


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and _is_positive(value)


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1 << 20

"""vLLM's arguments for speculation, and checks for methods that vLLM cannot run here."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from pdmesh.core.speculation.proposal_length import Method, Speculation
from pdmesh.errors import EngineMisconfigured

PROMPT_LOOKUP_CLASS = "pdmesh.engine.vllm.speculation.prompt_lookup.PromptLookup"
_SUFFIX_PACKAGE = "arctic_inference"


def check_speculation(speculation: Speculation) -> None:
    """Raises EngineMisconfigured for a method that would not work, before vLLM starts."""
    if not speculation.max_tokens:
        return
    match speculation.method:
        case Method.PROMPT_LOOKUP:
            return
        case Method.SUFFIX if find_spec(_SUFFIX_PACKAGE) is None:
            raise _unusable("method", "suffix needs the package arctic-inference, which is missing")
        case Method.SUFFIX if not speculation.is_fixed:
            raise _unusable("schedule", "the method suffix needs the schedule fixed")


def _unusable(field: str, problem: str) -> EngineMisconfigured:
    name = f"speculation.{field}"
    return EngineMisconfigured(f"{name}: {problem}", reason="SPECULATION_UNSUPPORTED", field=name)


def speculative_config(speculation: Speculation, max_batch: int) -> dict[str, Any]:
    """vLLM's argument `speculative_config`.

    The schedule has the number of tokens to propose at each batch size, for the configured rate of
    accepted tokens. `AdaptiveScheduler` replaces the schedule as tokens are checked (S118).
    """
    told: dict[str, Any] = {"num_speculative_tokens": speculation.max_tokens}
    if not speculation.is_fixed:
        told["num_speculative_tokens_per_batch_size"] = speculation.schedule(max_batch)
    if speculation.method is Method.SUFFIX:
        return {"method": "suffix", **told}
    if speculation.method is Method.MTP:
        return {"method": "mtp", **told}
    if speculation.method in (Method.DRAFT_MODEL, Method.EAGLE):
        return {"method": speculation.method.value, "model": speculation.model, **told}
    return {"method": "custom_class", "model": PROMPT_LOOKUP_CLASS, **told}

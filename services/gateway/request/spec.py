"""What a client asked for, once validated: the same from HTTP and gRPC."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from pdmesh.core.tenancy.limits import ANYONE, Tenant


@dataclass(frozen=True, slots=True)
class SamplingSpec:
    """`max_tokens` None takes what the context leaves, up to `default_max_tokens` or else the
    gateway's default.
    """

    max_tokens: int | None = None
    default_max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    num_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class CallSpec:
    """One client call: `n` choices for each prompt. Prompts are token ids by now."""

    operation: str  # chat or text_completion
    model: str
    prompts: tuple[array[int], ...]
    sampling: SamplingSpec
    n: int = 1
    scenario: str = ""
    chat_id: str = ""
    cache_salt: str = ""
    field_of_prompt: str = "prompt"  # these two are named in errors about length
    field_of_max_tokens: str = "max_tokens"
    tenant: Tenant = ANYONE

"""Turns the sampling fields of an OpenAI request into a SamplingSpec.

Most requests set only a temperature and a length. For these requests, all other fields together
take almost no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Final

from msgspec.structs import replace

from pdmesh.core.sampling.logit_shaping import UNSHAPED, LogitShaping
from pdmesh.core.sampling.repetition import RepetitionRule, repetition_rule
from pdmesh.core.tenancy.limits import Tenant
from pdmesh.errors import InvalidRequest
from pdmesh.services.gateway.openai.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    RepetitionDetection,
)
from pdmesh.services.gateway.request.answer_form import asked_over_http, constraint_of
from pdmesh.services.gateway.request.bounds import as_sent, stops_of
from pdmesh.services.gateway.request.frontend import Frontend
from pdmesh.services.gateway.request.shaping import (
    AskedShaping,
    biases_by_id,
    logprob_ids_of,
    shaping_of,
    stop_ids_of,
)
from pdmesh.services.gateway.request.spec import SamplingSpec, ServedModel
from pdmesh.services.gateway.request.thinking import thinking_budget_of

# The fields that `_with_further` reads. If a request sets none of these fields, `_with_further` is
# called only for a model whose defaults shape logits.
_FURTHER: Final = (
    "presence_penalty", "frequency_penalty", "repetition_penalty", "top_k", "min_p", "min_tokens",
    "logit_bias", "bad_words", "allowed_token_ids", "thinking_token_budget", "logprob_token_ids",
    "response_format", "structured_outputs", "stop_token_ids", "repetition_detection",
)  # fmt: skip
_read_further: Final = attrgetter(*_FURTHER)


async def sampling_of(
    request: ChatCompletionRequest | CompletionRequest,
    max_tokens: int | None,
    num_logprobs: int | None,
    model: ServedModel,
    frontend: Frontend,
    tenant: Tenant,
) -> SamplingSpec:
    """Raises MeshError."""
    defaults = model.tokenizer.defaults
    plain = SamplingSpec(
        max_tokens=max_tokens,
        default_max_tokens=defaults.max_tokens,
        temperature=defaults.temperature if request.temperature is None else request.temperature,
        top_p=defaults.top_p if request.top_p is None else as_sent(request.top_p),
        seed=request.seed,
        stop=stops_of(request.stop),
        ignore_eos=request.ignore_eos,
        num_logprobs=num_logprobs,
        num_prompt_logprobs=None if request.stream else request.prompt_logprobs,
        is_stop_shown=bool(request.include_stop_str_in_output),
        are_special_shown=request.skip_special_tokens is False,
    )
    is_plain = _read_further(request).count(None) == len(_FURTHER)
    if is_plain and not defaults.shapes_logits:
        return plain
    return await _with_further(plain, request, model, frontend, tenant)


async def _with_further(
    plain: SamplingSpec,
    request: ChatCompletionRequest | CompletionRequest,
    model: ServedModel,
    frontend: Frontend,
    tenant: Tenant,
) -> SamplingSpec:
    """Raises MeshError."""
    tokenizer = model.tokenizer
    asked = AskedShaping(
        request.presence_penalty,
        request.frequency_penalty,
        request.repetition_penalty,
        request.top_k,
        request.min_p,
        request.min_tokens or 0,
        biases_by_id(request.logit_bias) if request.logit_bias else None,
        request.bad_words,
        request.allowed_token_ids,
        await thinking_budget_of(request.thinking_token_budget, model, frontend),
    )
    ids = logprob_ids_of(request.logprob_token_ids, tokenizer.vocab_size, plain.num_logprobs)
    _check_logprob_ids(frontend, model.name, ids)
    shaping = await shaping_of(asked, tokenizer, plain.max_tokens)
    form = asked_over_http(request.response_format, request.structured_outputs)
    constraint = await constraint_of(form, model, frontend, tenant)
    stop_token_ids = stop_ids_of(request.stop_token_ids, tokenizer.vocab_size)
    repetition = _repetition(request.repetition_detection)
    _check_shaping(frontend, model.name, shaping)
    return replace(
        plain,
        logprob_token_ids=ids,
        shaping=shaping,
        constraint=constraint,
        stop_token_ids=stop_token_ids,
        repetition=repetition,
    )


def _repetition(asked: RepetitionDetection | None) -> RepetitionRule | None:
    if asked is None:
        return None
    return repetition_rule(asked.max_pattern_size, asked.min_pattern_size, asked.min_count)


def _check_shaping(frontend: Frontend, model: str, shaping: LogitShaping) -> None:
    """Refuse shaping that the engine does not support with its settings, such as speculation."""
    if shaping is UNSHAPED:
        return
    for field in sorted(frontend.shared.fleet.unsupported_shaping(model)):
        # An instance of a later version may name a field that this gateway does not have.
        if getattr(shaping, field, None) != getattr(UNSHAPED, field, None):
            message = f"{field} is not supported by this model's engine as it is set up"
            raise InvalidRequest(message, reason="UNSUPPORTED_FIELD", field=field)


def _check_logprob_ids(frontend: Frontend, model: str, ids: Sequence[int]) -> None:
    """Raises InvalidRequest if the engine cannot give these logprobs with its settings."""
    field = "logprob_token_ids"
    if ids and field in frontend.shared.fleet.unsupported_shaping(model):
        message = f"{field} is not supported by this model's engine as it is set up"
        raise InvalidRequest(message, reason="UNSUPPORTED_FIELD", field=field)

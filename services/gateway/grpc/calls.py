"""Turns requests of the gRPC API into call specs: validates them and tokenizes their prompts."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

from pdmesh.core.kv.prefix.block_hash import token_array
from pdmesh.core.sampling.repetition import RepetitionRule, repetition_rule
from pdmesh.core.tenancy.limits import Tenant
from pdmesh.errors import InvalidRequest
from pdmesh.services.gateway.openai.calls import (
    chat_tokens,
    check_logprobs,
    check_num_prompt_logprobs,
    check_shaping,
    text_tokens,
)
from pdmesh.services.gateway.request.answer_form import asked_over_grpc, constraint_of
from pdmesh.services.gateway.request.bounds import (
    MAX_MESSAGES,
    check_choices,
    check_names,
    check_sampling,
    check_text,
    context_exceeded,
    in_range,
    nul_refused,
    stops_of,
)
from pdmesh.services.gateway.request.frontend import Frontend
from pdmesh.services.gateway.request.shaping import AskedShaping, shaping_of, stop_ids_of
from pdmesh.services.gateway.request.spec import CallSpec, SamplingSpec, ServedModel
from pdmesh.services.gateway.request.thinking import thinking_budget_of
from pdmesh.services.gateway.text.chat_template import Conversation
from pdmesh.v1 import inference_service_pb2 as pb

_OPTIONAL: Final = (
    "presence_penalty", "frequency_penalty", "repetition_penalty", "top_k", "min_p",
)  # fmt: skip
_ROLES: Final = frozenset({"system", "user", "assistant"})


async def generate_spec(
    request: pb.GenerateRequest, frontend: Frontend, tenant: Tenant
) -> CallSpec:
    """Raises MeshError."""
    model = await _served_model(request, frontend, tenant)
    sampling = await _sampling(request.params, model, frontend, tenant)
    match request.WhichOneof("prompt"):
        case "text":
            check_text(text=request.text)
            tokens = await text_tokens(request.text, model)
        case "token_ids":
            tokens = _checked_ids(request.token_ids.ids, model)
        case _:
            raise InvalidRequest("either text or token_ids is needed", field="prompt")
    return CallSpec(
        operation="text_completion",
        model=model.name,
        prompts=(_prompt(tokens, request, sampling),),
        sampling=sampling,
        tokenizer=model.tokenizer,
        n=request.n or 1,
        scenario=request.scenario,
        chat_id=request.chat_id,
        cache_salt=request.cache_salt,
        tenant=tenant,
    )


async def chat_spec(request: pb.ChatRequest, frontend: Frontend, tenant: Tenant) -> CallSpec:
    """Raises MeshError."""
    model = await _served_model(request, frontend, tenant)
    sampling = await _sampling(request.params, model, frontend, tenant)
    if not 0 < len(request.messages) <= MAX_MESSAGES:
        raise InvalidRequest(f"1 to {MAX_MESSAGES} messages are needed", field="messages")
    for index, message in enumerate(request.messages):
        if message.role not in _ROLES:
            field = f"messages[{index}].role"
            raise InvalidRequest("role must be system, user or assistant", field=field)
        if "\0" in message.content:
            raise nul_refused(f"messages[{index}].content")
    messages = [{"role": m.role, "content": m.content} for m in request.messages]
    tokens = await chat_tokens(Conversation(messages), model)
    return CallSpec(
        operation="chat",
        model=model.name,
        prompts=(_prompt(tokens, request, sampling),),
        sampling=sampling,
        tokenizer=model.tokenizer,
        n=request.n or 1,
        scenario=request.scenario,
        chat_id=request.chat_id,
        cache_salt=request.cache_salt,
        field_of_prompt="messages",
        tenant=tenant,
    )


def _checked_ids(ids: Sequence[int], model: ServedModel) -> array[int]:
    context, vocab_size = model.context_length, model.tokenizer.vocab_size
    if len(ids) > context:
        raise context_exceeded(f"{len(ids)} tokens", context, "token_ids")
    if ids and max(ids) >= vocab_size:
        raise InvalidRequest(f"token ids must be 0 to {vocab_size - 1}", field="token_ids")
    return token_array(ids)


async def _served_model(
    request: pb.GenerateRequest | pb.ChatRequest, frontend: Frontend, tenant: Tenant
) -> ServedModel:
    """Check what completions and chats have in common. Raises MeshError."""
    check_names(
        model=request.model,
        scenario=request.scenario,
        chat_id=request.chat_id,
        cache_salt=request.cache_salt,
    )
    seed = request.params.seed if request.params.HasField("seed") else None
    check_choices(n=request.n or None, seed=seed)
    return await frontend.served_model(request.model, tenant, request.scenario)


def _prompt(
    tokens: array[int], request: pb.GenerateRequest | pb.ChatRequest, sampling: SamplingSpec
) -> array[int]:
    """Raises InvalidRequest."""
    prompt = _truncated(tokens, request.params)
    check_num_prompt_logprobs((prompt,), sampling.num_prompt_logprobs, request.n or 1)
    return prompt


def _truncated(tokens: array[int], params: pb.GenerationParams) -> array[int]:
    if not params.HasField("truncate_prompt_tokens"):
        return tokens
    if not params.truncate_prompt_tokens:
        raise InvalidRequest("no token of the prompt is left", field="truncate_prompt_tokens")
    return tokens[-params.truncate_prompt_tokens :]


async def _sampling(
    params: pb.GenerationParams, model: ServedModel, frontend: Frontend, tenant: Tenant
) -> SamplingSpec:
    tokenizer, defaults = model.tokenizer, model.tokenizer.defaults
    max_tokens = params.max_tokens if params.HasField("max_tokens") else None
    temperature = params.temperature if params.HasField("temperature") else None
    top_p = params.top_p if params.HasField("top_p") else None
    num_logprobs = params.num_logprobs if params.HasField("num_logprobs") else None
    stops = stops_of(list(params.stop))
    for stop in stops:
        check_text(stop=stop)
    check_sampling(max_tokens=max_tokens, temperature=temperature, top_p=top_p)
    if num_logprobs is not None and num_logprobs > 20:
        raise InvalidRequest("num_logprobs must be at most 20", field="num_logprobs")
    check_logprobs(frontend, model.name, num_logprobs)
    num_prompt_logprobs: int | None = None
    if params.HasField("num_prompt_logprobs"):
        num_prompt_logprobs = params.num_prompt_logprobs
        in_range("num_prompt_logprobs", num_prompt_logprobs, 0, 20)
        check_logprobs(frontend, model.name, num_prompt_logprobs, "num_prompt_logprobs")
    for word in params.bad_words:
        check_text(bad_words=word)
    has_budget = params.HasField("thinking_token_budget")
    budget = params.thinking_token_budget if has_budget else None
    asked = AskedShaping(
        **{f: getattr(params, f) for f in _OPTIONAL if params.HasField(f)},
        min_tokens=params.min_tokens,
        logit_bias=dict(params.logit_bias),
        bad_words=params.bad_words,
        allowed_token_ids=params.allowed_token_ids or None,
        thinking_token_budget=await thinking_budget_of(budget, model, frontend),
    )
    shaping = await shaping_of(asked, tokenizer, max_tokens)
    check_shaping(frontend, model.name, shaping)
    has_form = params.HasField("structured_output")
    form = asked_over_grpc(params.structured_output) if has_form else None
    return SamplingSpec(
        max_tokens=max_tokens,
        default_max_tokens=defaults.max_tokens,
        temperature=defaults.temperature if temperature is None else temperature,
        top_p=defaults.top_p if top_p is None else top_p,
        seed=params.seed if params.HasField("seed") else None,
        stop=stops,
        ignore_eos=params.ignore_eos,
        num_logprobs=num_logprobs,
        num_prompt_logprobs=num_prompt_logprobs,
        shaping=shaping,
        constraint=await constraint_of(form, model, frontend, tenant),
        stop_token_ids=stop_ids_of(params.stop_token_ids, tokenizer.vocab_size),
        is_stop_shown=params.include_stop_in_output,
        are_special_shown=params.show_special_tokens,
        repetition=_repetition(params.repetition_detection),
    )


def _repetition(asked: pb.RepetitionDetection) -> RepetitionRule | None:
    return repetition_rule(asked.max_pattern_size, asked.min_pattern_size, asked.min_count)

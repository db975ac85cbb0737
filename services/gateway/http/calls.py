"""Turns OpenAI requests into call specs: validated, named, tokenized."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

from pdmesh.core.kv.prefix.block_hash import token_array
from pdmesh.core.tenancy.limits import Tenant
from pdmesh.errors import InvalidRequest
from pdmesh.services.gateway.access.access_control import check_model
from pdmesh.services.gateway.http.schema import (
    MAX_CHOICES,
    ChatCompletionRequest,
    CompletionRequest,
    TokenizeRequest,
    messages_of,
    prompts_of,
)
from pdmesh.services.gateway.request.bounds import context_exceeded, stops_of
from pdmesh.services.gateway.request.frontend import Frontend
from pdmesh.services.gateway.request.spec import CallSpec, SamplingSpec
from pdmesh.services.gateway.text.chat_template import Message as ChatMessage

_COMPLETION_DEFAULT_TOKENS = 16  # as OpenAI's


async def chat_spec(request: ChatCompletionRequest, frontend: Frontend, tenant: Tenant) -> CallSpec:
    """Raises MeshError."""
    model = frontend.model_name(request.model)
    check_model(tenant, model)
    num_logprobs = (request.top_logprobs or 0) if request.logprobs else None
    check_logprobs(frontend, model, num_logprobs)
    max_tokens = request.max_completion_tokens or request.max_tokens
    tokens = await chat_tokens(messages_of(request.messages), model, frontend)
    return CallSpec(
        operation="chat",
        model=model,
        prompts=(tokens,),
        sampling=_sampling(request, max_tokens, num_logprobs),
        n=request.n or 1,
        scenario=request.scenario,
        chat_id=request.chat_id,
        cache_salt=request.cache_salt,
        field_of_prompt="messages",
        field_of_max_tokens="max_completion_tokens"
        if request.max_completion_tokens
        else "max_tokens",
        tenant=tenant,
    )


async def completion_spec(
    request: CompletionRequest, frontend: Frontend, tenant: Tenant
) -> CallSpec:
    """Raises MeshError."""
    model = frontend.model_name(request.model)
    check_model(tenant, model)
    check_logprobs(frontend, model, request.logprobs)
    vocab_size = frontend.shared.tokenizer.vocab_size
    asked = prompts_of(request.prompt, vocab_size, frontend.context_length(model))
    n = request.n or 1
    if n * len(asked) > MAX_CHOICES:
        raise InvalidRequest(f"at most {MAX_CHOICES} choices over all prompts", field="n")
    prompts = [
        await text_tokens(p, model, frontend) if isinstance(p, str) else token_array(p)
        for p in asked
    ]
    return CallSpec(
        operation="text_completion",
        model=model,
        prompts=tuple(prompts),
        sampling=replace(
            _sampling(request, request.max_tokens, request.logprobs),
            default_max_tokens=_COMPLETION_DEFAULT_TOKENS,
        ),
        n=n,
        scenario=request.scenario,
        chat_id=request.chat_id,
        cache_salt=request.cache_salt,
        tenant=tenant,
    )


async def tokenized(
    request: TokenizeRequest, frontend: Frontend, tenant: Tenant
) -> tuple[array[int], int]:
    """The tokens that a request with this prompt or conversation would have, and the model's
    context.

    Raises MeshError.
    """
    model = frontend.model_name(request.model)
    check_model(tenant, model)
    if request.messages is not None:
        tokens = await chat_tokens(messages_of(request.messages), model, frontend)
    else:
        tokens = await text_tokens(request.prompt or "", model, frontend)
    return tokens, frontend.context_length(model)


async def text_tokens(
    text: str, model: str, frontend: Frontend, field: str = "prompt"
) -> array[int]:
    """Raises MeshError. A text that cannot fit the context is refused before it is encoded."""
    tokenizer = frontend.shared.tokenizer
    context = frontend.context_length(model)
    if len(text) > context * tokenizer.max_token_chars:
        raise context_exceeded(f"{len(text)} characters", context, field)
    return await tokenizer.encode(text, add_special_tokens=field == "prompt")


async def chat_tokens(
    messages: Sequence[ChatMessage], model: str, frontend: Frontend
) -> array[int]:
    """Raises MeshError."""
    tokenizer = frontend.shared.tokenizer
    if not tokenizer.has_chat_template:
        raise InvalidRequest("this model has no chat template", field="messages")
    return await text_tokens(tokenizer.render_chat(messages), model, frontend, "messages")


def check_logprobs(frontend: Frontend, model: str, num_logprobs: int | None) -> None:
    """Refuse logprobs that the instances cannot give, rather than leave them out."""
    if num_logprobs is None:
        return
    record = frontend.shared.fleet.reference(model)
    if record is not None and not record.supports_logprobs:
        raise InvalidRequest(
            "logprobs are not supported by this model's engine",
            reason="UNSUPPORTED_FIELD",
            field="logprobs",
        )


def _sampling(
    request: ChatCompletionRequest | CompletionRequest,
    max_tokens: int | None,
    num_logprobs: int | None,
) -> SamplingSpec:
    return SamplingSpec(
        max_tokens=max_tokens,
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        seed=request.seed,
        stop=stops_of(request.stop),
        ignore_eos=request.ignore_eos,
        num_logprobs=num_logprobs,
    )

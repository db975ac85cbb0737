"""Turns OpenAI requests into call specs: validates the requests and tokenizes the prompts.

A call is one request of a client, with one or more choices. A call spec has the call's prompts and
parameters.
"""

from __future__ import annotations

import asyncio
import dataclasses
from array import array
from collections.abc import Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from pdmesh.core.images.prompt_image import PromptImage, least_length
from pdmesh.core.kv.prefix.block_hash import token_array, tokens_to_bytes
from pdmesh.core.tenancy.limits import Tenant
from pdmesh.errors import InvalidRequest
from pdmesh.services.gateway.access.access_control import Permit, charged
from pdmesh.services.gateway.images.loading import Held
from pdmesh.services.gateway.openai.chat_images import (
    asked_images,
    check_places,
    check_sent,
    has_images,
    no_images,
    placed,
)
from pdmesh.services.gateway.openai.chat_messages import messages_of
from pdmesh.services.gateway.openai.parser_request import may_call, parsing_of
from pdmesh.services.gateway.openai.sampling import sampling_of
from pdmesh.services.gateway.openai.schema import (
    MAX_CHOICES,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    chat_id_of,
    checked_ids,
    is_echo_alone,
    prompts_of,
    session_of,
)
from pdmesh.services.gateway.openai.tool_call_form import call_constraint
from pdmesh.services.gateway.openai.tools import tools_of
from pdmesh.services.gateway.parsing.answer_parsing import Parsing
from pdmesh.services.gateway.request.bounds import context_exceeded
from pdmesh.services.gateway.request.frontend import Frontend
from pdmesh.services.gateway.request.spec import CallSpec, SamplingSpec, ServedModel
from pdmesh.services.gateway.text.chat_template import RESERVED_VARIABLES, Conversation
from pdmesh.services.gateway.text.tokenizer import Tokenizer

_COMPLETION_DEFAULT_TOKENS = 16  # as in OpenAI's API
MAX_PROMPT_LOGPROBS: Final = 1 << 18  # in the answer to one call


async def chat_spec(request: ChatCompletionRequest, frontend: Frontend, permit: Permit) -> CallSpec:
    """Raises MeshError."""
    tenant = permit.tenant
    model = await frontend.served_model(request.model, tenant, request.scenario)
    num_logprobs = (request.top_logprobs or 0) if request.logprobs else None
    check_logprobs(frontend, model.name, num_logprobs)
    check_logprobs(frontend, model.name, request.prompt_logprobs, "prompt_logprobs")
    max_tokens = request.max_completion_tokens or request.max_tokens
    has_special = bool(request.add_special_tokens)
    tokens, images, held = await chat_prompt(
        request, model, frontend, permit, add_special_tokens=has_special
    )
    check_sent(images, request.n or 1)
    sampling = await sampling_of(request, max_tokens, num_logprobs, model, frontend, tenant)
    prompt = truncated(tokens, request, model.context_length)
    check_num_prompt_logprobs((prompt,), sampling.num_prompt_logprobs, request.n or 1)
    has_form = sampling.constraint is not None or may_call(request)
    constrained = tokens_to_bytes(prompt) if has_form else b""
    form_field = sampling.constraint.asked_by if sampling.constraint is not None else ""
    parsers = frontend.shared.parsers
    parsing = await parsing_of(request, model, parsers, constrained, form_field)
    if parsing is not None:
        sampling = await _parsed_sampling(sampling, parsing, request, model, frontend, tenant)
    is_hidden = parsing is not None and request.include_reasoning is False
    if is_hidden:  # log probabilities and token ids would reveal the reasoning
        sampling = replace(sampling, num_logprobs=None, logprob_token_ids=())
    return CallSpec(
        operation="chat",
        model=model.name,
        prompts=(prompt,),
        sampling=sampling,
        tokenizer=model.tokenizer,
        context_length=model.context_length,
        n=request.n or 1,
        scenario=request.scenario,
        chat_id=chat_id_of(request),
        session=session_of(request.session),
        cache_salt=request.cache_salt,
        field_of_prompt="messages",
        field_of_max_tokens="max_completion_tokens"
        if request.max_completion_tokens
        else "max_tokens",
        spells_ids=bool(request.return_tokens_as_token_ids),
        has_token_ids=bool(request.return_token_ids) and not is_hidden,
        parsing=parsing,
        tenant=tenant,
        adapter=model.adapter,
        images=images,
        held_images=held,
    )


async def chat_prompt(
    request: ChatCompletionRequest | TokenizeRequest,
    model: ServedModel,
    frontend: Frontend,
    permit: Permit,
    *,
    add_special_tokens: bool = False,
) -> tuple[array[int], tuple[PromptImage, ...], Held | None]:
    """The tokens of a conversation, and its images. Raises MeshError.

    While the images are read, the tenant is charged for the prompt. So no image is read for a
    tenant that has no tokens left. If the number of an image's tokens depends on the size of the
    image, the image is charged as one token. The whole charge is refunded at the end.
    """
    messages = request.messages or []
    facts = frontend.shared.fleet.images_of(model.name) if has_images(messages) else None
    if facts is None:
        if has_images(messages):
            raise no_images(messages, model.name)
        conversation = conversation_of(request)
        tokens = await chat_tokens(
            conversation, model, permit.tenant, add_special_tokens=add_special_tokens
        )
        return tokens, (), None
    if getattr(request, "truncate_prompt_tokens", None) is not None:
        message = "a prompt with images cannot be truncated"
        raise InvalidRequest(message, reason="UNSUPPORTED_FIELD", field="truncate_prompt_tokens")
    asked, shared = asked_images(messages), frontend.shared.images
    shared.check_count(asked, facts.max_images)
    (mark,) = await model.tokenizer.strings((facts.placeholder,))
    conversation = conversation_of(request, mark)
    tokens = await chat_tokens(
        conversation, model, permit.tenant, add_special_tokens=add_special_tokens
    )
    check_places(tokens, facts, len(asked))
    num_tokens = least_length(len(tokens), facts, len(asked))
    await charged(permit, lambda: permit.charge(num_tokens))
    try:
        loaded = await shared.load(asked)
    finally:
        permit.settle(0)
    prompt, images = placed(tokens, facts, loaded)
    return prompt, images, loaded.held


async def _parsed_sampling(
    sampling: SamplingSpec,
    parsing: Parsing,
    request: ChatCompletionRequest,
    model: ServedModel,
    frontend: Frontend,
    tenant: Tenant,
) -> SamplingSpec:
    """`sampling` with the changes that the parsers need. Raises InvalidRequest.

    If tool calls must have a form and the model may answer without a call, the request may not ask
    for a form of the answer. If it must call a tool, a form of the answer is ignored.
    """
    constraint = sampling.constraint
    if parsing.calls is not None:
        if constraint is not None and request.tool_choice in (None, "auto"):
            message = "response_format is not supported with tools whose calls must have a form"
            raise InvalidRequest(message, reason="UNSUPPORTED_FIELD", field="response_format")
        constraint = await call_constraint(parsing.calls, request, model, frontend, tenant)
    if constraint is not None and parsing.begins_after:
        constraint = dataclasses.replace(constraint, begins_after=parsing.begins_after)
    shows = sampling.are_special_shown or parsing.shows_special
    return replace(sampling, constraint=constraint, are_special_shown=shows)


async def completion_spec(
    request: CompletionRequest,
    frontend: Frontend,
    tenant: Tenant,
    default_max_tokens: int | None = _COMPLETION_DEFAULT_TOKENS,
) -> CallSpec:
    """`default_max_tokens` is used if the model has no default. Raises MeshError."""
    model = await frontend.served_model(request.model, tenant, request.scenario)
    check_logprobs(frontend, model.name, request.logprobs)
    check_logprobs(frontend, model.name, request.prompt_logprobs, "prompt_logprobs")
    n = request.n or 1
    asked, prompts = await completion_prompts(request, model)
    max_tokens, default = completion_lengths(request, model, default_max_tokens)
    sampling = await sampling_of(request, max_tokens, request.logprobs, model, frontend, tenant)
    num_prompt_logprobs = sampling.num_prompt_logprobs
    if num_prompt_logprobs is None and request.echo:
        num_prompt_logprobs = request.logprobs
    check_num_prompt_logprobs(prompts, num_prompt_logprobs, n)
    return CallSpec(
        operation="text_completion",
        model=model.name,
        prompts=tuple(prompts),
        tokenizer=model.tokenizer,
        context_length=model.context_length,
        sampling=replace(
            sampling,
            default_max_tokens=default,
            num_prompt_logprobs=num_prompt_logprobs,
        ),
        n=n,
        scenario=request.scenario,
        chat_id=chat_id_of(request),
        session=session_of(request.session),
        cache_salt=request.cache_salt,
        echoed=await _echoed(asked, prompts, request, model.tokenizer) if request.echo else (),
        is_echo_alone=is_echo_alone(request),
        spells_ids=bool(request.return_tokens_as_token_ids),
        has_token_ids=bool(request.return_token_ids),
        tenant=tenant,
        adapter=model.adapter,
    )


def completion_lengths(
    request: CompletionRequest,
    model: ServedModel,
    default_max_tokens: int | None = _COMPLETION_DEFAULT_TOKENS,
) -> tuple[int | None, int | None]:
    """The most tokens that a completion asks for, and the number that applies if it asks for none.

    `default_max_tokens` applies if the model has no default, either.
    """
    max_tokens = 1 if is_echo_alone(request) else request.max_tokens
    return max_tokens, model.tokenizer.defaults.max_tokens or default_max_tokens


async def completion_prompts(
    request: CompletionRequest, model: ServedModel
) -> tuple[Sequence[str | list[int]], Sequence[array[int]]]:
    """The prompts as they were sent, and the tokens of each. Raises MeshError."""
    context = model.context_length
    asked = prompts_of(request.prompt, model.tokenizer.vocab_size, context)
    if (request.n or 1) * len(asked) > MAX_CHOICES:
        raise InvalidRequest(
            f"at most {MAX_CHOICES} choices over all prompts are allowed", field="n"
        )
    has_special = request.add_special_tokens is not False
    prompts = [
        truncated(
            await text_tokens(p, model, add_special_tokens=has_special)
            if isinstance(p, str)
            else token_array(p),
            request,
            context,
        )
        for p in asked
    ]
    return asked, prompts


async def tokenized(
    request: TokenizeRequest, frontend: Frontend, permit: Permit
) -> tuple[array[int], ServedModel]:
    """The tokens of the request's prompt or conversation, and its model.

    Raises MeshError.
    """
    model = await frontend.any_model(request.model, permit.tenant)
    has_special = request.add_special_tokens
    if request.messages is None:
        has_special = has_special is not False
        tokens = await text_tokens(request.prompt or "", model, add_special_tokens=has_special)
    else:
        tokens, _, _ = await chat_prompt(
            request, model, frontend, permit, add_special_tokens=bool(has_special)
        )
    await charged(permit, lambda: permit.charge(len(tokens)))
    permit.settle(len(tokens))
    return tokens, model


async def detokenized(request: DetokenizeRequest, frontend: Frontend, permit: Permit) -> str:
    """The text of the tokens, including special ones. Raises MeshError."""
    await charged(permit, lambda: permit.charge(len(request.tokens)))
    model = await frontend.any_model(request.model, permit.tenant)
    tokenizer = model.tokenizer
    ids = checked_ids(request.tokens, tokenizer.vocab_size, model.context_length, "tokens")
    text = await tokenizer.decode_prompt(ids)
    permit.settle(len(request.tokens))
    return text


async def text_tokens(
    text: str,
    model: ServedModel,
    field: str = "prompt",
    *,
    add_special_tokens: bool = True,
    owner: str | None = None,
) -> array[int]:
    """Encode a text. Raises MeshError.

    A text that is too long for the context is refused before it is encoded. `owner` is a tenant.
    The tokens of the text are cached, in sections, for later texts of this tenant.
    """
    context = model.context_length
    if len(text) > context * model.tokenizer.max_token_chars:
        raise context_exceeded(f"{len(text)} characters", context, field)
    return await model.tokenizer.encode(text, add_special_tokens=add_special_tokens, owner=owner)


async def chat_tokens(
    conversation: Conversation,
    model: ServedModel,
    tenant: Tenant,
    *,
    add_special_tokens: bool = False,
) -> array[int]:
    """The tokens of a rendered conversation. Raises MeshError.

    By default no special tokens are added, because most templates write them.
    """
    tokenizer = model.tokenizer
    if not tokenizer.has_chat_template:
        raise InvalidRequest("this model has no chat template", field="messages")
    if conversation.tools or conversation.variables:
        # Unlike messages, tools and variables may take long to render.
        text = await asyncio.to_thread(tokenizer.render_chat, conversation)
    else:
        text = tokenizer.render_chat(conversation)
    return await text_tokens(
        text, model, "messages", add_special_tokens=add_special_tokens, owner=tenant.name
    )


MAX_VARIABLES: Final = 256


def template_variables(
    given: Mapping[str, object] | None, reasoning_effort: str | None = None
) -> dict[str, object]:
    """The variables of the chat template that the client sets. Raises InvalidRequest."""
    if not given and reasoning_effort is None:
        return {}
    variables = dict(given or {})
    if len(variables) > MAX_VARIABLES:
        message = f"chat_template_kwargs sets at most {MAX_VARIABLES} variables"
        raise InvalidRequest(message, field="chat_template_kwargs")
    for name in sorted(variables.keys() & RESERVED_VARIABLES):
        field = f"chat_template_kwargs.{name}"
        raise InvalidRequest(f"{field} cannot be set", reason="UNSUPPORTED_FIELD", field=field)
    if reasoning_effort is not None:
        variables["reasoning_effort"] = reasoning_effort
        variables.setdefault("enable_thinking", reasoning_effort != "none")
    return variables


def conversation_of(
    request: ChatCompletionRequest | TokenizeRequest, image_mark: str = ""
) -> Conversation:
    """The conversation in the form for chat templates. Raises InvalidRequest.

    `image_mark` is the text that stands for an image.
    """
    effort = request.reasoning_effort if isinstance(request, ChatCompletionRequest) else None
    return Conversation(
        messages_of(request.messages or [], image_mark),
        tools_of(request.tools),
        template_variables(request.chat_template_kwargs, effort),
        request.add_generation_prompt is not False,
        bool(request.continue_final_message),
    )


def check_logprobs(
    frontend: Frontend, model: str, num_logprobs: int | None, field: str = "logprobs"
) -> None:
    """Raises InvalidRequest if the instances cannot compute logprobs."""
    if num_logprobs is None:
        return
    record = frontend.shared.fleet.reference(model)
    if record is not None and not record.supports_logprobs:
        raise InvalidRequest(
            f"{field} are not supported by this model's engine",
            reason="UNSUPPORTED_FIELD",
            field=field,
        )


def check_num_prompt_logprobs(
    prompts: Sequence[array[int]], num_each: int | None, num_choices: int
) -> None:
    """Limit the number of prompt tokens' log probabilities in an answer. Raises InvalidRequest."""
    if num_each is None:
        return
    num = sum(map(len, prompts)) * (num_each + 1) * num_choices
    if num > MAX_PROMPT_LOGPROBS:
        message = (
            f"the answer would have {num} log probabilities of prompt tokens, and may have "
            f"{MAX_PROMPT_LOGPROBS}: ask for fewer of each, or for a shorter prompt"
        )
        raise InvalidRequest(message, field="prompt_logprobs")


def truncated(
    tokens: array[int], request: ChatCompletionRequest | CompletionRequest, context: int
) -> array[int]:
    """The prompt, cut to `truncate_prompt_tokens` tokens if it is longer. Raises InvalidRequest."""
    asked = request.truncate_prompt_tokens
    if asked is None:
        return tokens
    num = context if asked == -1 else asked
    if num == 0:
        raise InvalidRequest("no token of the prompt is left", field="truncate_prompt_tokens")
    return tokens[:num] if request.truncation_side == "right" else tokens[-num:]


async def _echoed(
    asked: Sequence[str | list[int]],
    prompts: Sequence[array[int]],
    request: CompletionRequest,
    tokenizer: Tokenizer,
) -> tuple[str, ...]:
    """The text of each prompt. A truncated prompt gives the text of its remaining tokens."""
    if request.truncate_prompt_tokens is None:
        pairs = zip(asked, prompts, strict=True)
        return tuple(
            [p if isinstance(p, str) else await tokenizer.decode_prompt(ids) for p, ids in pairs]
        )
    return tuple([await tokenizer.decode_prompt(ids) for ids in prompts])

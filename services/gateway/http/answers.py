"""The types of answers in `/openapi.json`, except those of messages, responses and pooling.

For speed, `format` and `logprobs` write answers without these types. The tests decode real answers
with these types, which refuse unknown fields.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType


class Answer(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The base of all answers. A field without a default is always present."""


class ErrorDetail(Answer):
    """`message` is for people. `code` is stable. `param` names the invalid field."""

    message: str
    type: Literal[
        "invalid_request_error",
        "authentication_error",
        "permission_error",
        "rate_limit_error",
        "server_error",
    ]
    param: str | None
    code: str


class ErrorAnswer(Answer):
    error: ErrorDetail


class PromptTokensDetails(Answer):
    cached_tokens: int  # prompt tokens that prefill did not compute, as their KV was cached


class CompletionTokensDetails(Answer):
    reasoning_tokens: int


class UsageAnswer(Answer):
    """`completion_tokens_details` is absent unless answers are parsed (`CallSpec.parsing`)."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class ChatToken(Answer):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprobs(ChatToken):
    top_logprobs: list[ChatToken]


class ChatLogprobs(Answer):
    content: list[ChatTokenLogprobs]
    refusal: None


class CompletionLogprobs(Answer):
    """With `echo`, the lists begin with the prompt's tokens.

    The first token of a prompt has no log probability.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptTokenLogprob(Answer):
    logprob: float
    rank: int  # the place among all tokens by probability; 1 is the likeliest
    decoded_token: str


# One item for each token of the prompt. An item maps token ids to log probabilities. The first item
# is None.
PromptLogprobsAnswer = list[dict[str, PromptTokenLogprob] | None]
# The stop token, the stop string or `repetition_detected` that ended the choice. None if the choice
# ended for another reason, such as the model's own end token.
StopReasonAnswer = int | str | None


FinishReasonName = Literal["stop", "length", "tool_calls", "repetition"]


class CalledFunctionAnswer(Answer):
    name: str
    arguments: str  # a JSON object, as the model wrote it


class ToolCallAnswer(Answer):
    id: str
    type: Literal["function"]
    function: CalledFunctionAnswer


class ChatAnswerMessage(Answer):
    """`content` is None if the answer has only reasoning or tool calls.

    `reasoning` and `reasoning_content` hold the same text.
    """

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallAnswer] | UnsetType = UNSET


class ChatChoice(Answer):
    index: int
    message: ChatAnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReasonName
    stop_reason: StopReasonAnswer
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Answer):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageAnswer
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobsAnswer | UnsetType = UNSET


class CalledFunctionDelta(Answer):
    arguments: str  # the next part of the JSON text
    name: str | UnsetType = UNSET


class ToolCallDeltaAnswer(Answer):
    """A piece of the tool call at `index`. Only the first piece has an id, a type and a name."""

    index: int
    function: CalledFunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(Answer):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDeltaAnswer] | UnsetType = UNSET


class ChatChunkChoice(Answer):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReasonName | None
    stop_reason: int | str | UnsetType | None = UNSET  # only in the last chunk of a choice
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Answer):
    """One event of a streamed chat. With `include_usage`, the last event has no choices."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageAnswer | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionChoice(Answer):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReasonName
    stop_reason: StopReasonAnswer
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobsAnswer | UnsetType = UNSET


class CompletionChunkChoice(Answer):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReasonName | None
    stop_reason: int | str | UnsetType | None = UNSET  # only in the last chunk of a choice
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Completion(Answer):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageAnswer


class CompletionChunk(Answer):
    """One event of a streamed completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    usage: UsageAnswer | UnsetType | None = UNSET


class ModelEntry(Answer):
    """A served model.

    `created` is the time at which this gateway first saw the model. `max_model_len` is the model's
    context length.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class ModelList(Answer):
    object: Literal["list"]
    data: list[ModelEntry]


class Tokenized(Answer):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Answer):
    prompt: str


class Live(Answer):
    status: Literal["live"]


class Readiness(Answer):
    status: Literal["ready", "not ready"]
    waiting_for: list[str]

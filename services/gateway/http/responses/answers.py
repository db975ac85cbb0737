"""The types of the Responses API's answers, for `/openapi.json`."""

from __future__ import annotations

from typing import Any, Literal

from pdmesh.services.gateway.http.answers import Answer, ChatTokenLogprobs
from pdmesh.services.gateway.http.responses.schema import InputItem

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]


class OutputText(Answer, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any]  # always empty
    logprobs: list[ChatTokenLogprobs]


class OutputMessage(Answer, tag_field="type", tag="message"):
    id: str
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningText(Answer, tag_field="type", tag="reasoning_text"):
    text: str


class OutputReasoning(Answer, tag_field="type", tag="reasoning"):
    id: str
    status: ItemStatus
    summary: list[Any]  # always empty
    content: list[ReasoningText]


class OutputCall(Answer, tag_field="type", tag="function_call"):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


OutputItem = OutputMessage | OutputReasoning | OutputCall
OutputPart = OutputText | ReasoningText


class IncompleteDetails(Answer):
    reason: Literal["max_output_tokens"]


class ResponseFailure(Answer):
    code: str
    message: str


class InputTokensDetails(Answer):
    cached_tokens: int  # prompt tokens that prefill did not compute, as their KV was cached
    cache_write_tokens: int


class OutputTokensDetails(Answer):
    reasoning_tokens: int


class ResponseUsage(Answer):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseAnswer(Answer, tag_field="object", tag="response"):
    """A response. It repeats fields of the request. `store` says whether it is kept."""

    id: str
    created_at: int
    completed_at: int | None
    status: ResponseStatus
    background: bool
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None
    store: bool
    previous_response_id: str | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    reasoning: dict[str, Any]
    service_tier: str
    temperature: float | None
    text: dict[str, Any]
    tool_choice: Any
    tools: list[Any]
    top_logprobs: int
    top_p: float | None
    truncation: str
    user: str | None


class ResponseEvent(Answer):
    sequence_number: int


class ResponseCreated(ResponseEvent, tag_field="type", tag="response.created"):
    response: ResponseAnswer


class ResponseInProgress(ResponseEvent, tag_field="type", tag="response.in_progress"):
    response: ResponseAnswer


class ResponseCompleted(ResponseEvent, tag_field="type", tag="response.completed"):
    response: ResponseAnswer


class ResponseIncomplete(ResponseEvent, tag_field="type", tag="response.incomplete"):
    response: ResponseAnswer


class ResponseFailed(ResponseEvent, tag_field="type", tag="response.failed"):
    response: ResponseAnswer


class OutputItemAdded(ResponseEvent, tag_field="type", tag="response.output_item.added"):
    output_index: int
    item: OutputItem


class OutputItemDone(ResponseEvent, tag_field="type", tag="response.output_item.done"):
    output_index: int
    item: OutputItem


class ItemEvent(ResponseEvent):
    item_id: str
    output_index: int


class ContentPartAdded(ItemEvent, tag_field="type", tag="response.content_part.added"):
    content_index: int
    part: OutputPart


class ContentPartDone(ItemEvent, tag_field="type", tag="response.content_part.done"):
    content_index: int
    part: OutputPart


class OutputTextDelta(ItemEvent, tag_field="type", tag="response.output_text.delta"):
    content_index: int
    delta: str
    logprobs: list[ChatTokenLogprobs]


class OutputTextDone(ItemEvent, tag_field="type", tag="response.output_text.done"):
    content_index: int
    text: str
    logprobs: list[ChatTokenLogprobs]


class ReasoningTextDelta(ItemEvent, tag_field="type", tag="response.reasoning_text.delta"):
    content_index: int
    delta: str


class ReasoningTextDone(ItemEvent, tag_field="type", tag="response.reasoning_text.done"):
    content_index: int
    text: str


class ArgumentsDelta(ItemEvent, tag_field="type", tag="response.function_call_arguments.delta"):
    delta: str


class ArgumentsDone(ItemEvent, tag_field="type", tag="response.function_call_arguments.done"):
    name: str
    arguments: str


AnyResponseEvent = (
    ResponseCreated
    | ResponseInProgress
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
    | OutputItemAdded
    | OutputItemDone
    | ContentPartAdded
    | ContentPartDone
    | OutputTextDelta
    | OutputTextDone
    | ReasoningTextDelta
    | ReasoningTextDone
    | ArgumentsDelta
    | ArgumentsDone
)


class ForgottenResponse(Answer, tag_field="object", tag="response"):
    id: str
    deleted: bool


class ItemPage(Answer, tag_field="object", tag="list"):
    data: list[InputItem]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokenCount(Answer, tag_field="object", tag="response.input_tokens"):
    input_tokens: int

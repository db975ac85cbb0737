"""The bounds of fields for `/openapi.json`, as annotations of their types.

The bounds are checked elsewhere (`request.bounds`, `request.shaping`), because gRPC needs them too.
`tests/integration/gateway/api/test_openapi.py` compares these bounds with the checked ones.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

from msgspec import Meta

from pdmesh.core.sampling.logit_shaping import MAX_ALLOWED, MAX_BIASES, MAX_LOGPROB_IDS
from pdmesh.core.sampling.repetition import MAX_COUNT, MAX_PATTERN
from pdmesh.core.sampling.thinking_budget import MAX_BUDGET
from pdmesh.services.gateway.request.bounds import (
    MAX_N,
    MAX_NAME_CHARS,
    MAX_STOP_CHARS,
    MAX_STOPS,
    MAX_TOKENS,
)
from pdmesh.services.gateway.request.shaping import (
    MAX_BIAS,
    MAX_STOP_IDS,
    MAX_WORD_CHARS,
    MAX_WORDS,
)


def between(low: float, high: float) -> Meta:
    return Meta(extra_json_schema={"minimum": low, "maximum": high})


def above(low: float, high: float) -> Meta:
    return Meta(extra_json_schema={"exclusiveMinimum": low, "maximum": high})


def entries(low: int, high: int) -> Meta:
    return Meta(extra_json_schema={"minItems": low, "maxItems": high})


def chars(low: int, high: int) -> Meta:
    return Meta(extra_json_schema={"minLength": low, "maxLength": high})


TokenId = Annotated[int, Meta(extra_json_schema={"minimum": 0})]
Name = Annotated[str, chars(0, MAX_NAME_CHARS)]
SessionId = Annotated[str, chars(1, MAX_NAME_CHARS)]
NumTokens = Annotated[int, between(1, MAX_TOKENS)]
NumTokensOrNone = Annotated[int, between(0, MAX_TOKENS)]  # 0 is allowed with an echo
NumChoices = Annotated[int, between(1, MAX_N)]
Seed = Annotated[int, between(-(1 << 63), (1 << 63) - 1 - MAX_N)]
Temperature = Annotated[float, between(0, 2)]
TopP = Annotated[float, above(0, 1)]
MinP = Annotated[float, between(0, 1)]
NumDimensions = Annotated[int, between(1, 1 << 16)]
TextLimit = Annotated[int, between(0, MAX_TOKENS)]
TopN = Annotated[int, between(0, MAX_TOKENS)]
_Text = Annotated[str, chars(1, MAX_TOKENS)]
Texts = _Text | Annotated[list[_Text], entries(1, 2048)]
TopK = Annotated[int, between(-1, (1 << 31) - 1)]
Penalty = Annotated[float, between(-2, 2)]
RepetitionPenalty = Annotated[float, above(0, MAX_BIAS)]
MinTokens = Annotated[int, between(0, MAX_TOKENS)]
ThinkingBudget = Annotated[int, between(-1, MAX_BUDGET)]
PatternSize = Annotated[int, between(0, MAX_PATTERN)]
PatternCount = Annotated[int, between(0, MAX_COUNT)]
Truncation = Annotated[int, between(-1, MAX_TOKENS)]
FewLogprobs = Annotated[int, between(0, 5)]
Logprobs = Annotated[int, between(0, 20)]
StopString = Annotated[str, chars(1, MAX_STOP_CHARS)]
Stop = StopString | Annotated[list[StopString], entries(0, MAX_STOPS)]
BadWords = Annotated[list[Annotated[str, chars(1, MAX_WORD_CHARS)]], entries(0, MAX_WORDS)]
AllowedIds = Annotated[list[TokenId], entries(1, MAX_ALLOWED)]
StopIds = Annotated[list[TokenId], entries(0, MAX_STOP_IDS)]
LogprobIds = Annotated[list[TokenId], entries(0, MAX_LOGPROB_IDS)]
_ID_AS_NAME: Final = {"propertyNames": {"pattern": "^[0-9]{1,10}$"}, "maxProperties": MAX_BIASES}
LogitBias = Annotated[dict[str, float], Meta(extra_json_schema=_ID_AS_NAME)]
_SOME_IDS: Final = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
# msgspec cannot tell list[str], list[int] and list[list[int]] apart, so it checks none of them.
Prompts = Annotated[
    list[Any],
    Meta(
        extra_json_schema={
            "minItems": 1,
            "items": {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string"}, _SOME_IDS]},
        }
    ),
]

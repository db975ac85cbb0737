"""The accepted requests for vectors and scores, as typed structs: OpenAI's fields, then vLLM's.

A request gets a 400 if it sets a field that would change the answer but is not supported.
`UNSUPPORTED` lists these fields, each with the values that have no effect and are accepted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec

from pdmesh.errors import InvalidRequest
from pdmesh.services.gateway.openai import openapi_bounds as told
from pdmesh.services.gateway.openai.json_body import decoded
from pdmesh.services.gateway.openai.unsupported_fields import NeutralValues
from pdmesh.services.gateway.request.bounds import MAX_TOKENS, check_names, in_range

MAX_INPUTS: Final = 2048  # as in OpenAI's API
MAX_DIMENSIONS: Final = 1 << 16

# The type is Any because a client may send anything in these fields. Values that would have an
# effect are refused.
_Anything = Any
_UNSUPPORTED: Final[Mapping[str, tuple[object, ...]]] = {
    "priority": (0,),
    "padding": ("do_not_pad",),
    "mm_processor_kwargs": ({},),
}


class PoolingRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields that all requests for vectors or scores have."""

    UNSUPPORTED: ClassVar[NeutralValues] = NeutralValues(_UNSUPPORTED)

    model: told.Name | None = None
    user: str | None = None
    truncate_prompt_tokens: told.Truncation | None = None
    truncation_side: Literal["left", "right"] | None = None
    use_activation: bool | None = None
    request_id: str | None = None  # ignored, because the gateway chooses the ids of requests
    priority: _Anything = None
    padding: _Anything = None
    mm_processor_kwargs: _Anything = None
    cache_salt: told.Name = ""
    scenario: told.Name = ""


class EmbeddingsRequest(PoolingRequest, forbid_unknown_fields=True, kw_only=True):
    UNSUPPORTED: ClassVar[NeutralValues] = NeutralValues(
        {
            **_UNSUPPORTED,
            "embed_dtype": ("float32",),
            "endianness": ("native", "little"),
            "messages": (),
            "chat_template": (),
            "chat_template_kwargs": ({},),
            "normalize": (),
        }
    )

    input: str | told.Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: told.NumDimensions | None = None
    add_special_tokens: bool | None = None
    embed_dtype: _Anything = None
    endianness: _Anything = None
    messages: _Anything = None
    chat_template: _Anything = None
    chat_template_kwargs: _Anything = None
    normalize: _Anything = None


_embeddings_decoder: Final = msgspec.json.Decoder(EmbeddingsRequest)


def parse_embeddings(body: bytes, ignored: list[str] | None = None) -> EmbeddingsRequest:
    """Raises InvalidRequest with the field.

    If `ignored` is None, an unknown field is refused. Otherwise its path is added to `ignored`.
    """
    request = decoded(_embeddings_decoder, {}, body, ignored)
    _check(request)
    in_range("dimensions", request.dimensions, 1, MAX_DIMENSIONS)
    return request


class RerankText(msgspec.Struct, forbid_unknown_fields=True):
    """A document as an object."""

    text: str


class _ScoringRequest(PoolingRequest, forbid_unknown_fields=True, kw_only=True):
    """The common fields of score and rerank.

    In `max_tokens_per_query` and `max_tokens_per_doc`, 0 means that there is no limit.
    """

    UNSUPPORTED: ClassVar[NeutralValues] = NeutralValues(
        {**_UNSUPPORTED, "instruction": (), "chat_template_kwargs": ({},)}
    )

    max_tokens_per_query: told.TextLimit | None = None
    max_tokens_per_doc: told.TextLimit | None = None
    instruction: _Anything = None
    chat_template_kwargs: _Anything = None


class ScoreRequest(_ScoringRequest, forbid_unknown_fields=True, kw_only=True):
    """A request like those of vLLM's /score. It sets the two fields of one pair in `SCORED`.

    The two fields hold one text each, one text and a list, or two lists of equal length.
    """

    text_1: told.Texts | None = None
    text_2: told.Texts | None = None
    data_1: told.Texts | None = None
    data_2: told.Texts | None = None
    queries: told.Texts | None = None
    documents: told.Texts | None = None
    items: told.Texts | None = None


class RerankRequest(_ScoringRequest, forbid_unknown_fields=True, kw_only=True):
    """A request like those of /rerank in vLLM, Jina and Cohere."""

    query: Annotated[str, told.chars(1, MAX_TOKENS)]
    documents: str | Annotated[list[str | RerankText], told.entries(1, MAX_INPUTS)]
    top_n: told.TopN | None = None
    return_documents: bool | None = None


# The pairs of fields that may hold the texts of a score.
SCORED: Final = (
    ("text_1", "text_2"),
    ("data_1", "data_2"),
    ("queries", "documents"),
    ("queries", "items"),
)
_score_decoder: Final = msgspec.json.Decoder(ScoreRequest)
_rerank_decoder: Final = msgspec.json.Decoder(RerankRequest)


@dataclass(frozen=True, slots=True)
class ScoredTexts:
    """The texts to compare: `first` has one text, or as many texts as `second`.

    `fields` are the names of the two fields, for error messages.
    """

    first: Sequence[str]
    second: Sequence[str]
    fields: tuple[str, str]

    def pairs(self) -> Iterator[tuple[str, str]]:
        first = self.first if len(self.first) > 1 else repeat(self.first[0], len(self.second))
        return zip(first, self.second, strict=True)


def parse_score(body: bytes, ignored: list[str] | None = None) -> tuple[ScoreRequest, ScoredTexts]:
    """As `parse_embeddings`."""
    request = decoded(_score_decoder, {}, body, ignored)
    _check_scoring(request)
    given = {name for pair in SCORED for name in pair if getattr(request, name) is not None}
    fields = next((pair for pair in SCORED if set(pair) == given), None)
    if fields is None:
        known = ", ".join(f"{one} and {other}" for one, other in SCORED)
        raise InvalidRequest(f"give one of these: {known}", field="text_1")
    first, second = (_texts(getattr(request, name), name) for name in fields)
    if len(first) not in (1, len(second)):
        message = f"{fields[0]} must be one text, or as many as {fields[1]} has"
        raise InvalidRequest(message, field=fields[0])
    return request, ScoredTexts(first, second, fields)


def parse_rerank(
    body: bytes, ignored: list[str] | None = None
) -> tuple[RerankRequest, ScoredTexts]:
    """As `parse_embeddings`."""
    request = decoded(_rerank_decoder, {RerankRequest: {"documents": RerankText}}, body, ignored)
    _check_scoring(request)
    in_range("top_n", request.top_n, 0, MAX_TOKENS)
    if not request.query:
        raise InvalidRequest("query is empty", field="query")
    given = [request.documents] if isinstance(request.documents, str) else request.documents
    documents = [d if isinstance(d, str) else d.text for d in given]
    return request, ScoredTexts(
        [request.query], _texts(documents, "documents"), ("query", "documents")
    )


def _texts(given: str | list[str], field: str) -> Sequence[str]:
    texts = [given] if isinstance(given, str) else given
    if not 1 <= len(texts) <= MAX_INPUTS:
        raise InvalidRequest(f"{field} must have 1 to {MAX_INPUTS} texts", field=field)
    return texts


def _check_scoring(request: _ScoringRequest) -> None:
    _check(request)
    in_range("max_tokens_per_query", request.max_tokens_per_query, 0, MAX_TOKENS)
    in_range("max_tokens_per_doc", request.max_tokens_per_doc, 0, MAX_TOKENS)


def _check(request: PoolingRequest) -> None:
    type(request).UNSUPPORTED.check(request)
    in_range("truncate_prompt_tokens", request.truncate_prompt_tokens, -1, MAX_TOKENS)
    check_names(model=request.model or "", cache_salt=request.cache_salt, scenario=request.scenario)

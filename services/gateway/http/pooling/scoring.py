"""Scores pairs of texts: with a cross-encoder, or by the cosine of their vectors."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from pdmesh.core.pooling.facts import PoolingTask
from pdmesh.core.pooling.truncation import Pair, TextCut, input_length, one_text, two_texts
from pdmesh.errors import InvalidRequest
from pdmesh.services.gateway.http.pooling.inputs import Reading, check_total, cut_of, tokens_of
from pdmesh.services.gateway.http.pooling.schema import RerankRequest, ScoredTexts, ScoreRequest
from pdmesh.services.gateway.pooling.spec import PoolingAnswer, PoolingSpec
from pdmesh.services.gateway.request.bounds import context_exceeded
from pdmesh.services.gateway.request.spec import ServedModel

Numbers = npt.NDArray[np.floating]
_MAX_JOINED_CHARS: Final = 16 << 20  # characters of a call's pairs, each joined into one text


async def scoring_spec(
    base: PoolingSpec,
    scored: ScoredTexts,
    request: ScoreRequest | RerankRequest,
    served: ServedModel,
) -> PoolingSpec:
    """`base` with its task, and with the inputs made from the texts. Raises MeshError."""
    cut = cut_of(request, served.context_length)
    scored = await _limited(scored, request, served)
    facts = base.model.facts
    if not facts.is_cross_encoder:
        reading = Reading(cut, is_lower_case=facts.is_lower_case)
        return await _vectors_spec(base, scored, served, reading)
    _check_lengths(scored, served, cut)
    if facts.joins_pairs:
        return await _joined_spec(base, scored, served, cut)
    return await _pairs_spec(
        base, scored, served, cut, cuts_second=bool(request.max_tokens_per_doc)
    )


async def _vectors_spec(
    base: PoolingSpec, scored: ScoredTexts, served: ServedModel, reading: Reading
) -> PoolingSpec:
    """`base` with one input for each first text, followed by one for each second text."""
    inputs: list[array[int]] = []
    for texts, field in zip((scored.first, scored.second), scored.fields, strict=True):
        inputs += await tokens_of(list(texts), served, reading, field)
    check_total(sum(map(len, inputs)), scored.fields[1])
    return replace(base, task=PoolingTask.EMBED, inputs=tuple(inputs))


async def _joined_spec(
    base: PoolingSpec, scored: ScoredTexts, served: ServedModel, cut: TextCut | None
) -> PoolingSpec:
    """`base` with each pair as one input. The tokenizer joins the texts as it encodes a pair."""
    bulk, field = served.tokenizer.bulk, scored.fields[1]
    pairs = [
        bulk.bounded_pair(one, other, served.context_length, cut) for one, other in scored.pairs()
    ]
    num_chars = sum(len(one) + len(other) for one, other in pairs)
    if num_chars > _MAX_JOINED_CHARS:
        message = f"the texts of all pairs have {num_chars} characters, at most {_MAX_JOINED_CHARS}"
        raise InvalidRequest(f"{message} are allowed: send fewer at once", field=field)
    contents = await bulk.contents(pairs, cut=cut)
    special = bulk.around_one
    _check_inputs([input_length(c.length, special, cut) for c in contents], served, field)
    inputs = tuple(one_text(content, special, cut) for content in contents)
    return replace(base, task=PoolingTask.CLASSIFY, inputs=inputs)


async def _pairs_spec(
    base: PoolingSpec,
    scored: ScoredTexts,
    served: ServedModel,
    cut: TextCut | None,
    *,
    cuts_second: bool,
) -> PoolingSpec:
    bulk, field = served.tokenizer.bulk, scored.fields[1]
    sides = [
        await bulk.contents([bulk.bounded(t, served.context_length, cut) for t in texts], cut=cut)
        for texts in (scored.first, scored.second)
    ]
    num_each = 1 if len(sides[0]) > 1 else len(sides[1])
    pairs = list(zip(sides[0] * num_each, sides[1], strict=True))
    special = bulk.around_two
    lengths = [input_length(one.length + other.length, special, cut) for one, other in pairs]
    _check_inputs(lengths, served, field)
    found: list[Pair] = []
    for one, other in pairs:
        pair = two_texts(one, other, special, cut, cuts_second=cuts_second)
        if pair is None:
            message = "truncate_prompt_tokens leaves no token of a document after the query"
            raise InvalidRequest(message, field="truncate_prompt_tokens")
        found.append(pair)
    return replace(
        base,
        task=PoolingTask.CLASSIFY,
        inputs=tuple(pair.tokens for pair in found),
        first_lengths=tuple(pair.first_length for pair in found),
    )


def _check_inputs(lengths: Sequence[int], served: ServedModel, field: str) -> None:
    """Check the lengths of the inputs before the inputs are made. Raises InvalidRequest.

    Each input may repeat the query, so all inputs together may be large.
    """
    for place, length in enumerate(lengths):
        if length > served.context_length:
            name = f"{field}[{place}]"
            raise context_exceeded(f"{length} tokens", served.context_length, name)
        if not length:
            raise InvalidRequest("a pair of texts is empty", field=f"{field}[{place}]")
    check_total(sum(lengths), field)


async def _limited(
    scored: ScoredTexts, request: ScoreRequest | RerankRequest, served: ServedModel
) -> ScoredTexts:
    """The texts, cut to the numbers of tokens that the request allows. Raises InvalidRequest."""
    sides: list[Sequence[str]] = []
    bulk, context = served.tokenizer.bulk, served.context_length
    limits = {
        "max_tokens_per_query": request.max_tokens_per_query,
        "max_tokens_per_doc": request.max_tokens_per_doc,
    }
    for field, limit in limits.items():
        if limit and limit >= context:
            message = f"{field} must be less than the model's context, {context}"
            raise InvalidRequest(message, field=field)
    for texts, limit in zip((scored.first, scored.second), limits.values(), strict=True):
        if limit:
            texts = await bulk.shortened([bulk.bounded(t, context, None) for t in texts], limit)
        sides.append(texts)
    first, second = sides
    return ScoredTexts(first, second, scored.fields)


def _check_lengths(scored: ScoredTexts, served: ServedModel, cut: TextCut | None) -> None:
    """Without `cut`, raises InvalidRequest if a pair is too long however it is encoded."""
    longest = max(len(one) + len(other) for one, other in scored.pairs())
    if cut is None and longest > served.context_length * served.tokenizer.max_token_chars:
        raise context_exceeded(f"{longest} characters", served.context_length, scored.fields[1])


def scores_of(spec: PoolingSpec, answer: PoolingAnswer, num_first: int) -> list[float]:
    """One score for each pair. A million numbers take some milliseconds."""
    numbers = np.frombuffer(b"".join(answer.parts), dtype="<f4")
    if spec.task is PoolingTask.CLASSIFY:
        return [float(each) for each in numbers]
    vectors = numbers.reshape(len(spec.inputs), answer.num_values)
    second = vectors[num_first:]
    first = np.broadcast_to(vectors[:num_first], second.shape)

    def products(one: Numbers, other: Numbers) -> Numbers:
        """The dot product of each pair, in float64, because float32 could overflow."""
        found: Numbers = np.einsum("ij,ij->i", one, other, dtype=np.float64)
        return found

    lengths = np.sqrt(products(first, first) * products(second, second))
    return [float(each) for each in products(first, second) / np.maximum(lengths, 1e-8)]

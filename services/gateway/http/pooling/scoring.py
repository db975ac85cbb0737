"""Scores pairs of texts: with a cross-encoder, or by the cosine of their vectors."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pdmesh.core.pooling.facts import PoolingTask
from pdmesh.errors import InvalidRequest
from pdmesh.services.gateway.http.pooling.inputs import cut_of, tokens_of
from pdmesh.services.gateway.http.pooling.schema import RerankRequest, ScoredTexts, ScoreRequest
from pdmesh.services.gateway.pooling.spec import PoolingAnswer, PoolingSpec
from pdmesh.services.gateway.request.bounds import context_exceeded
from pdmesh.services.gateway.request.spec import ServedModel
from pdmesh.services.gateway.text.tokenizer import TextCut


async def scoring_spec(
    base: PoolingSpec,
    scored: ScoredTexts,
    request: ScoreRequest | RerankRequest,
    served: ServedModel,
) -> PoolingSpec:
    """`base` with its inputs. Raises MeshError."""
    scored = await _limited(scored, request, served)
    facts, cut = base.model.facts, cut_of(request, served.context_length)
    if facts.is_lower_case:
        first, second = ([t.lower() for t in each] for each in (scored.first, scored.second))
        scored = ScoredTexts(first, second, scored.fields)
    if not facts.is_cross_encoder:
        return await _vectors_spec(base, scored, served, cut)
    num_each = 1 if len(scored.first) > 1 else len(scored.second)
    pairs = list(zip(list(scored.first) * num_each, scored.second, strict=True))
    _check_lengths(pairs, served, cut, scored.fields[1])
    if facts.joins_pairs:
        joined = [one + other for one, other in pairs]
        inputs = await served.tokenizer.encode_texts(joined, add_special_tokens=True, cut=cut)
        lengths: tuple[int, ...] = ()
    else:
        found = await served.tokenizer.encode_pairs(pairs, cut)
        inputs = [pair.tokens for pair in found]
        lengths = tuple(pair.first_length for pair in found)
    for place, tokens in enumerate(inputs):
        if len(tokens) > served.context_length:
            field = f"{scored.fields[1]}[{place}]"
            raise context_exceeded(f"{len(tokens)} tokens", served.context_length, field)
        if not tokens:
            raise InvalidRequest("a pair of texts is empty", field=f"{scored.fields[1]}[{place}]")
    return replace(base, task=PoolingTask.CLASSIFY, inputs=tuple(inputs), first_lengths=lengths)


async def _vectors_spec(
    base: PoolingSpec, scored: ScoredTexts, served: ServedModel, cut: TextCut | None
) -> PoolingSpec:
    """The vectors of the first texts, then of the second ones."""
    inputs: list[array[int]] = []
    for texts, field in zip((scored.first, scored.second), scored.fields, strict=True):
        inputs += await tokens_of(
            list(texts), served, cut, add_special_tokens=True, is_lower_case=False, field=field
        )
    return replace(base, task=PoolingTask.EMBED, inputs=tuple(inputs))


async def _limited(
    scored: ScoredTexts, request: ScoreRequest | RerankRequest, served: ServedModel
) -> ScoredTexts:
    """Each text cut to the tokens that the request allows it."""
    sides: list[Sequence[str]] = []
    limits = {
        "max_tokens_per_query": request.max_tokens_per_query,
        "max_tokens_per_doc": request.max_tokens_per_doc,
    }
    for texts, (field, limit) in zip((scored.first, scored.second), limits.items(), strict=True):
        if limit and limit >= served.context_length:
            message = f"{field} must be less than the model's context, {served.context_length}"
            raise InvalidRequest(message, field=field)
        sides.append(await served.tokenizer.shortened_texts(texts, limit) if limit else texts)
    first, second = sides
    return ScoredTexts(first, second, scored.fields)


def _check_lengths(
    pairs: Sequence[tuple[str, str]], served: ServedModel, cut: TextCut | None, field: str
) -> None:
    """A pair that cannot fit is refused before it is encoded."""
    longest = max(len(one) + len(other) for one, other in pairs)
    if cut is None and longest > served.context_length * served.tokenizer.max_token_chars:
        raise context_exceeded(f"{longest} characters", served.context_length, field)


def scores_of(spec: PoolingSpec, answer: PoolingAnswer, num_first: int) -> list[float]:
    """One for each pair."""
    numbers = np.frombuffer(b"".join(answer.parts), dtype="<f4")
    if spec.task is PoolingTask.CLASSIFY:
        return [float(each) for each in numbers]
    vectors = numbers.reshape(len(spec.inputs), answer.num_values)
    first, second = vectors[:num_first], vectors[num_first:]
    lengths = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    products = (first * second).sum(axis=1)
    return [float(each) for each in products / np.maximum(lengths, 1e-8)]

"""The HTTP paths for vectors (embeddings) and scores of texts."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Final

import msgspec

from pdmesh.core.pooling.facts import PoolingFacts, PoolingTask
from pdmesh.errors import InvalidRequest
from pdmesh.services.gateway.access.access_control import Permit
from pdmesh.services.gateway.http.exchange import HttpExchange
from pdmesh.services.gateway.http.pooling.answers import (
    Embeddings,
    Reranked,
    Score,
    Scores,
    reranked,
    usage_of,
    write_embeddings,
)
from pdmesh.services.gateway.http.pooling.inputs import Reading, cut_of, tokens_of
from pdmesh.services.gateway.http.pooling.schema import (
    EmbeddingsRequest,
    PoolingRequest,
    RerankRequest,
    ScoredTexts,
    ScoreRequest,
    parse_embeddings,
    parse_rerank,
    parse_score,
)
from pdmesh.services.gateway.http.pooling.scoring import scores_of, scoring_spec
from pdmesh.services.gateway.http.routes import ASKING_ERRORS, HttpRoute, Operation
from pdmesh.services.gateway.http.serving.intake import Intake
from pdmesh.services.gateway.pooling.call_runner import CallerGone, CallRunner
from pdmesh.services.gateway.pooling.spec import PoolingAnswer, PoolingSpec
from pdmesh.services.gateway.request.deltas import ClientDisconnected
from pdmesh.services.gateway.request.frontend import Frontend
from pdmesh.services.gateway.request.spec import ServedModel

_SCORE_PATHS: Final = ("/score", "/v1/score")
_RERANK_PATHS: Final = ("/rerank", "/v1/rerank", "/v2/rerank")
_EMBEDS: Final = attrgetter("embeds")
_SCORES: Final = attrgetter("scores")
_MAX_VALUES_HERE: Final = 1 << 17  # if there are more numbers, a thread compares them
_encode: Final = msgspec.json.encode


class PoolingPaths:
    def __init__(self, frontend: Frontend, intake: Intake) -> None:
        self._frontend, self._intake = frontend, intake
        self._runner = CallRunner(frontend)

    def routes(self) -> list[HttpRoute]:
        embeddings = Operation(
            "The vectors of texts", Embeddings, takes=EmbeddingsRequest, errors=ASKING_ERRORS
        )
        score = Operation(
            "How near texts are to others", Scores, takes=ScoreRequest, errors=ASKING_ERRORS
        )
        rerank = Operation(
            "Documents by how near they are to a query",
            Reranked,
            takes=RerankRequest,
            errors=ASKING_ERRORS,
        )
        return [
            HttpRoute("POST", "/v1/embeddings", self._embeddings, embeddings),
            *(HttpRoute("POST", path, self._score, score) for path in _SCORE_PATHS),
            *(HttpRoute("POST", path, self._rerank, rerank) for path in _RERANK_PATHS),
        ]

    async def _embeddings(self, exchange: HttpExchange) -> None:
        permit = await self._intake.admit(exchange)
        try:
            body = await self._intake.body(exchange)
            request = parse_embeddings(body, self._intake.ignored(exchange))
            spec, served = await self._spec(request, "embeddings", permit, _EMBEDS)
            if not spec.model.facts.embeds:
                message = f"the model {spec.model.name} makes no vectors: it scores texts"
                raise InvalidRequest(message, reason="WRONG_TASK", field="model")
            _check_dimensions(request.dimensions, spec.model.facts)
            reading = Reading(
                cut_of(request, served.context_length),
                add_special_tokens=request.add_special_tokens is not False,
                is_lower_case=spec.model.facts.is_lower_case,
            )
            with exchange.watched():
                inputs = await tokens_of(request.input, served, reading)
            spec = replace(spec, num_dimensions=request.dimensions or 0, inputs=inputs)
            empty = Embeddings(
                id=exchange.request_id,
                object="list",
                created=int(time.time()),
                model=spec.model.name,
                data=[],
                usage=usage_of(spec.num_tokens),
            )
            is_base64 = request.encoding_format == "base64"
            async with self._answered(exchange, spec, permit) as answer:
                await write_embeddings(exchange, empty, answer, is_base64=is_base64)
        finally:
            permit.leave()

    async def _score(self, exchange: HttpExchange) -> None:
        permit = await self._intake.admit(exchange)
        try:
            body = await self._intake.body(exchange)
            request, scored = parse_score(body, self._intake.ignored(exchange))
            async with self._scores(exchange, request, scored, "score", permit) as (spec, scores):
                answer = Scores(
                    id=exchange.request_id,
                    object="list",
                    created=int(time.time()),
                    model=spec.model.name,
                    data=[Score(place, "score", score) for place, score in enumerate(scores)],
                    usage=usage_of(spec.num_tokens),
                )
                await exchange.json(_encode(answer))
        finally:
            permit.leave()

    async def _rerank(self, exchange: HttpExchange) -> None:
        permit = await self._intake.admit(exchange)
        try:
            body = await self._intake.body(exchange)
            request, scored = parse_rerank(body, self._intake.ignored(exchange))
            async with self._scores(exchange, request, scored, "rerank", permit) as (spec, scores):
                has_documents = request.return_documents is not False
                results = reranked(
                    scores, scored.second, request.top_n or 0, has_documents=has_documents
                )
                usage = usage_of(spec.num_tokens)
                name = spec.model.name
                await exchange.json(_encode(Reranked(exchange.request_id, name, results, usage)))
        finally:
            permit.leave()

    @contextlib.asynccontextmanager
    async def _scores(
        self,
        exchange: HttpExchange,
        request: ScoreRequest | RerankRequest,
        scored: ScoredTexts,
        operation: str,
        permit: Permit,
    ) -> AsyncIterator[tuple[PoolingSpec, list[float]]]:
        """Raises MeshError, ClientDisconnected."""
        spec, served = await self._spec(request, operation, permit, _SCORES)
        if not spec.model.facts.scores:
            message = f"the model {spec.model.name} has several classes: it scores no pairs"
            raise InvalidRequest(message, reason="WRONG_TASK", field="model")
        with exchange.watched():
            spec = await scoring_spec(spec, scored, request, served)
        spec = replace(spec, field=scored.fields[1])
        async with self._answered(exchange, spec, permit) as answer:
            work = partial(scores_of, spec, answer, len(scored.first))
            is_small = spec.num_values * len(spec.inputs) <= _MAX_VALUES_HERE
            yield spec, work() if is_small else await asyncio.to_thread(work)

    async def _spec(
        self,
        request: PoolingRequest,
        operation: str,
        permit: Permit,
        fits: Callable[[PoolingFacts], bool],
    ) -> tuple[PoolingSpec, ServedModel]:
        """The call that the request asks for, without its inputs. Raises MeshError."""
        model, served = await self._frontend.pooling_model(
            request.model or "", permit.tenant, request.scenario, fits
        )
        spec = PoolingSpec(
            operation=operation,
            model=model,
            task=PoolingTask.EMBED,
            use_activation=request.use_activation,
            scenario=request.scenario,
            cache_salt=request.cache_salt,
            vocabulary=served.tokenizer.vocabulary,
            tenant=permit.tenant,
        )
        return spec, served

    @contextlib.asynccontextmanager
    async def _answered(
        self, exchange: HttpExchange, spec: PoolingSpec, permit: Permit
    ) -> AsyncIterator[PoolingAnswer]:
        """Raises MeshError, ClientDisconnected."""
        try:
            async with self._runner.answered(
                spec,
                permit,
                exchange.request_id,
                exchange.header(b"traceparent"),
                exchange.connection.watch,
            ) as answer:
                yield answer
        except CallerGone as gone:
            # The traceback's frames refer to the call, and the call to the error. This cycle would
            # keep the inputs in memory.
            gone.with_traceback(None)
            raise ClientDisconnected from None
        finally:
            exchange.connection.unwatch()


def _check_dimensions(asked: int | None, facts: PoolingFacts) -> None:
    if asked is not None and (why := facts.why_not_dimensions(asked)):
        raise InvalidRequest(why, field="dimensions")

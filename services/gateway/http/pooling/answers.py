"""The types of answers with vectors or scores. Embeddings are written in pieces."""

from __future__ import annotations

import asyncio
import binascii
from collections.abc import AsyncIterator, Sequence
from typing import Final, Literal

import msgspec
import numpy as np

from pdmesh.services.gateway.http.exchange import HttpExchange
from pdmesh.services.gateway.pooling.spec import PoolingAnswer

_PIECE_BYTES: Final = 1 << 17
_encode: Final = msgspec.json.encode


class Embedding(msgspec.Struct):
    """`embedding` is a list of numbers, or base64 of little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class PoolingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class Embeddings(msgspec.Struct):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Embedding]
    usage: PoolingUsage


class Score(msgspec.Struct):
    index: int
    object: Literal["score"]
    score: float


class Scores(msgspec.Struct):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: PoolingUsage


class RerankDocument(msgspec.Struct):
    text: str


class RerankResult(msgspec.Struct, omit_defaults=True):
    """`document` is left out if the request does not want it."""

    index: int
    relevance_score: float
    document: RerankDocument | None = None


class Reranked(msgspec.Struct):
    """The documents, the highest scores first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: PoolingUsage


def reranked(
    scores: Sequence[float], documents: Sequence[str], top_n: int, *, has_documents: bool
) -> list[RerankResult]:
    """The best `top_n` documents, or all if `top_n` is 0.

    Documents with equal scores keep their order.
    """
    order = sorted(range(len(scores)), key=lambda place: -scores[place])
    return [
        RerankResult(
            place, scores[place], RerankDocument(documents[place]) if has_documents else None
        )
        for place in order[: top_n or len(order)]
    ]


def usage_of(num_tokens: int) -> PoolingUsage:
    return PoolingUsage(num_tokens, num_tokens)


async def write_embeddings(
    exchange: HttpExchange, empty: Embeddings, answer: PoolingAnswer, *, is_base64: bool
) -> None:
    """Write an answer in pieces, because its vectors may take many megabytes.

    `empty` is the answer without its vectors.
    """
    before, after = _encode(empty).split(b'"data":[]')
    pieces: list[bytes] = [before, b'"data":[']
    num_bytes = 0
    async for entry in _entries(answer, is_base64=is_base64):
        if num_bytes >= _PIECE_BYTES:
            if not exchange.has_started:
                await exchange.start(200, [(b"content-type", b"application/json")])
            await exchange.write(b"".join(pieces))
            pieces, num_bytes = [], 0
            await asyncio.sleep(0)
        pieces.append(entry)
        num_bytes += len(entry)
    pieces += [b"]", after]
    data = b"".join(pieces)
    if exchange.has_started:
        await exchange.write(data, is_last=True)
    else:
        await exchange.json(data)


async def _entries(answer: PoolingAnswer, *, is_base64: bool) -> AsyncIterator[bytes]:
    for index, values in enumerate(answer.vectors()):
        if is_base64:
            shown = b'"%b"' % binascii.b2a_base64(values, newline=False)
        else:
            shown = _encode(np.frombuffer(values, dtype="<f4").tolist())
        start = b"," if index else b""
        yield b'%b{"object":"embedding","index":%d,"embedding":%b}' % (start, index, shown)

"""Texts wait for encoding threads in batches of bounded size.

A short text never waits behind a long one.
"""

from __future__ import annotations

import asyncio
import threading
from array import array
from collections.abc import Sequence

import pytest

from pdmesh.errors import Overloaded
from pdmesh.services.gateway.text.encoding_threads import (
    EncodingJob,
    EncodingQueues,
    long_threads,
)
from tests.support.waiting import until

LONG = "x" * 70_000


class Encoder:
    """An encoder that returns the length of a text as its token.

    It can be blocked with `gate`, and records its batches.
    """

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, jobs: Sequence[EncodingJob]) -> list[array[int]]:
        self.batches.append([len(s.text) for s in jobs])
        assert self.gate.wait(60)
        if any("!" in s.text for s in jobs):
            raise ValueError("no")
        return [array("I", [len(s.text), int(s.add_special_tokens)]) for s in jobs]


async def test_texts_that_wait_for_a_thread_are_encoded_together() -> None:
    encoder = Encoder()
    queues = EncodingQueues(num_threads=1)
    encoder.gate.clear()
    asks = [
        asyncio.create_task(queues.encode(encoder, EncodingJob("a" * i, i == 4)))
        for i in range(1, 7)
    ]
    await until(lambda: encoder.batches == [[1]])
    asks[2].cancel()
    await asyncio.sleep(0)
    encoder.gate.set()
    done = await asyncio.gather(*asks, return_exceptions=True)
    assert encoder.batches == [[1], [2], [4], [5, 6]], (
        "a batch has only calls of one kind, and no cancelled ones"
    )
    assert [d[0] for d in done if not isinstance(d, BaseException)] == [1, 2, 4, 5, 6]
    assert queues.num_pending_chars == 0
    queues.close()


@pytest.mark.fault("F31")
async def test_a_short_text_does_not_wait_for_a_long_one() -> None:
    encoder = Encoder()
    queues = EncodingQueues(num_threads=1)
    encoder.gate.clear()
    long = asyncio.create_task(queues.encode(encoder, EncodingJob(LONG)))
    await until(lambda: encoder.batches == [[len(LONG)]])
    short = asyncio.create_task(queues.encode(encoder, EncodingJob("abc")))
    await until(lambda: encoder.batches[1:] == [[3]])  # another thread encodes the short text now
    encoder.gate.set()
    assert list(await short) == [3, 0]
    assert (await long)[0] == len(LONG)
    queues.close()


@pytest.mark.fault("F31")
async def test_text_beyond_the_bound_is_refused_until_there_is_room_again() -> None:
    encoder = Encoder()
    queues = EncodingQueues(num_threads=1, max_pending_chars=10)
    encoder.gate.clear()
    first = asyncio.create_task(queues.encode(encoder, EncodingJob("a" * 8)))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await queues.encode(encoder, EncodingJob("b" * 3))
    encoder.gate.set()
    await first
    assert list(await queues.encode(encoder, EncodingJob("b" * 3))) == [3, 0]
    queues.close()


async def test_a_text_that_cannot_be_encoded_fails_only_its_own_batch() -> None:
    encoder, queues = Encoder(), EncodingQueues(num_threads=1)
    with pytest.raises(ValueError, match="no"):
        await queues.encode(encoder, EncodingJob("!"))
    assert list(await queues.encode(encoder, EncodingJob("ab"))) == [2, 0]
    assert queues.num_pending_chars == 0
    queues.close()


async def test_each_text_is_encoded_by_the_tokenizer_of_its_model() -> None:
    first, second, queues = Encoder(), Encoder(), EncodingQueues(num_threads=1)
    first.gate.clear()
    asks = [
        asyncio.create_task(queues.encode(encoder, EncodingJob("a" * size)))
        for size, encoder in enumerate((first, first, second, second, first), start=1)
    ]
    await until(lambda: first.batches == [[1]])
    first.gate.set()
    assert [(await ask)[0] for ask in asks] == [1, 2, 3, 4, 5]
    assert (first.batches, second.batches) == ([[1], [2], [5]], [[3, 4]])
    queues.close()


@pytest.mark.parametrize("num_long_threads", [1, 3])
async def test_as_many_long_texts_are_encoded_at_once_as_there_are_threads(
    num_long_threads: int,
) -> None:
    """With one thread only, more processors would not help a gateway."""
    encoder = Encoder()
    queues = EncodingQueues(num_threads=1, num_long_threads=num_long_threads)
    encoder.gate.clear()
    asks = [asyncio.create_task(queues.encode(encoder, EncodingJob(LONG))) for _ in range(4)]
    await until(lambda: len(encoder.batches) == num_long_threads)
    short = asyncio.create_task(queues.encode(encoder, EncodingJob("abc")))
    await until(lambda: encoder.batches[num_long_threads:] == [[3]])
    encoder.gate.set()
    assert [len(await ask) for ask in (*asks, short)] == [2] * 5
    assert len(encoder.batches) == 5
    queues.close()


def test_processors_remain_for_the_loop_and_for_short_texts() -> None:
    assert [long_threads(n) for n in (1, 2, 3, 4, 8)] == [1, 1, 1, 2, 6]

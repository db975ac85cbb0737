"""Encodes text on threads, in batches. Long and short texts have separate queues and threads.

Passing work to a thread and back costs as much as encoding a thousand characters. So the texts that
gather while a thread works are passed to it together. Encoding a text that fills a model's context
takes a tenth of a second. With separate queues, such a text delays other long texts, but no short
ones.

A setting gives the number of threads for long texts. The default is the number of processors minus
two, which remain for the event loop and short texts. Calls for vectors and scores share one more
thread. The amount of text that may wait is bounded, with a separate bound for these calls.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

from pdmesh.cores import usable_cores
from pdmesh.errors import Overloaded

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EncodingJob:
    """A text to encode.

    If `owner` is set, the tokens of the text are cached, in sections, for later texts of this
    tenant.
    """

    text: str
    add_special_tokens: bool = False
    owner: str | None = None


Encode = Callable[[Sequence[EncodingJob]], list["array[int]"]]

MAX_PENDING_CHARS: Final = 32 << 20
_KEPT_PROCESSORS: Final = 2  # for the event loop and for short texts
_LONG_CHARS: Final = 65536
_MAX_BATCH_CHARS: Final = 131072


def long_threads(num_processors: int) -> int:
    """The number of threads for long texts, if no setting gives it."""
    return max(1, num_processors - _KEPT_PROCESSORS)


class EncodingQueues:
    """The queues that all tokenizers of a gateway share, with bounds for all models together.

    `num_long_threads` is the number of threads for long texts. If it is 0, the function
    `long_threads` determines the number.
    """

    def __init__(
        self,
        num_threads: int,
        max_pending_chars: int = MAX_PENDING_CHARS,
        num_long_threads: int = 1,
    ) -> None:
        self._short = _Queue(num_threads, "tokenizer")
        self._long = _Queue(num_long_threads or long_threads(len(usable_cores())), "tokenizer-long")
        self._bulk = ThreadPoolExecutor(1, thread_name_prefix="tokenizer-bulk")
        self._max_pending_chars = max_pending_chars
        self.num_pending_chars = self.num_bulk_chars = 0

    async def encode(self, encode: Encode, job: EncodingJob) -> array[int]:
        """Encode a text on a thread with `encode(jobs)`, which may raise.

        Raises Overloaded if too much text waits.
        """
        num_chars = len(job.text)
        if self.num_pending_chars + num_chars > self._max_pending_chars:
            raise Overloaded("too much text waits to be tokenized")
        queue = self._long if num_chars > _LONG_CHARS else self._short
        self.num_pending_chars += num_chars
        try:
            return await queue.encode(_Item(encode, job))
        finally:
            self.num_pending_chars -= num_chars

    async def in_turns(self, turns: Iterable[Callable[[], Sequence[T]]], num_chars: int) -> list[T]:
        """Run the turns of one call in sequence. A turn is a piece of the call's work.

        Turns of several calls alternate. `num_chars` is the length of the texts of all turns.
        Raises Overloaded if too much text waits.
        """
        if self.num_bulk_chars + num_chars > self._max_pending_chars:
            raise Overloaded("too much text waits to be tokenized")
        loop = asyncio.get_running_loop()
        self.num_bulk_chars += num_chars
        try:
            return [each for turn in turns for each in await loop.run_in_executor(self._bulk, turn)]
        finally:
            self.num_bulk_chars -= num_chars

    def close(self) -> None:
        self._short.close()
        self._long.close()
        self._bulk.shutdown(wait=False, cancel_futures=True)


class _Item:
    __slots__ = ("done", "encode", "job")

    def __init__(self, encode: Encode, job: EncodingJob) -> None:
        self.encode, self.job = encode, job
        self.done: asyncio.Future[array[int]] = asyncio.get_running_loop().create_future()

    def is_like(self, other: _Item) -> bool:
        """Whether one call can encode both texts."""
        is_alike = self.job.add_special_tokens == other.job.add_special_tokens
        return is_alike and self.encode == other.encode


class _Queue:
    """A queue of texts. A thread of the queue takes a batch as soon as the thread is idle."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._num_idle = num_threads
        self._queue: deque[_Item] = deque()
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=name)

    async def encode(self, item: _Item) -> array[int]:
        self._queue.append(item)
        self._start()
        return await item.done

    def _start(self) -> None:
        while self._num_idle and (batch := self._next_batch()):
            self._num_idle -= 1
            work = asyncio.get_running_loop().run_in_executor(
                self._pool, batch[0].encode, [item.job for item in batch]
            )
            work.add_done_callback(partial(self._on_done, batch))

    def _next_batch(self) -> list[_Item]:
        """Take the texts at the front of the queue that one call of `Encode` can encode.

        Texts whose callers were cancelled are dropped.
        """
        batch: list[_Item] = []
        num_chars = 0
        while self._queue:
            item = self._queue[0]
            if not item.done.done():
                num_more = len(item.job.text)
                if batch and (
                    not item.is_like(batch[0]) or num_chars + num_more > _MAX_BATCH_CHARS
                ):
                    break
                batch.append(item)
                num_chars += num_more
            self._queue.popleft()
        return batch

    def _on_done(self, batch: list[_Item], work: asyncio.Future[list[array[int]]]) -> None:
        self._num_idle += 1
        error = asyncio.CancelledError() if work.cancelled() else work.exception()
        for index, item in enumerate(batch):
            if item.done.done():
                continue
            if error is None:
                item.done.set_result(work.result()[index])
            elif work.cancelled():
                item.done.cancel()
            else:
                item.done.set_exception(error)
        if not work.cancelled():
            self._start()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

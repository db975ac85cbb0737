"""Threads for disk calls, which may never return if the disk hangs.

The number of threads and the number of waiting calls are bounded. The threads are daemons, and
nothing waits for their end. A `ThreadPoolExecutor` would not do: the interpreter joins its threads
at exit, so a hanging disk would keep the process alive.
"""

from __future__ import annotations

import errno
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class NotTried(OSError):
    """The call was not made.

    Too many calls wait, `drop_waiting` dropped the call because the disk hangs, or the threads are
    closed.
    """

    def __init__(self) -> None:
        super().__init__(errno.EAGAIN, "not tried: the disk hangs, or too many calls wait for it")


class DiskThreads:
    """All methods may be called from any thread."""

    def __init__(
        self, name: str, num_threads: int, max_waiting: int, clock: Callable[[], float]
    ) -> None:
        self._max_waiting, self._clock = max_waiting, clock
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        # By the id of each thread that runs a call: when the call last made progress.
        self._progress: dict[int, float] = {}
        self._num_busy = 0  # threads that run a call or report its result
        self._changed = threading.Condition()
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True)
            for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_open(self) -> int:
        """The number of calls that wait or run."""
        with self._changed:
            return len(self._waiting) + self._num_busy

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Queue a call. Raises NotTried if too many calls wait, or after `close`.

        Cancelling the future of a waiting call drops the call.
        """
        future: Future[T] = Future()
        with self._changed:
            if self._is_closed or len(self._waiting) >= self._max_waiting:
                raise NotTried
            self._waiting.append((future, work))
            self._changed.notify_all()
        return future

    def got_on(self) -> None:
        """Note that the call on this thread made progress, and so does not hang."""
        me = threading.get_ident()
        if me in self._progress:
            self._progress[me] = self._clock()

    def waits_since(self) -> float | None:
        """The time since which some running call has made no progress.

        Returns the earliest such time, or None if no call runs.
        """
        with self._changed:
            return min(self._progress.values(), default=None)

    def drop_waiting(self) -> None:
        """Drop all waiting calls. Their futures raise NotTried."""
        with self._changed:
            dropped = list(self._waiting)
            self._waiting.clear()
            self._changed.notify_all()
        for future, _ in dropped:
            if future.set_running_or_notify_cancel():
                future.set_exception(NotTried())

    def flush(self, timeout_s: float) -> bool:
        """Wait until no call waits or runs. Returns False after a timeout."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._waiting and not self._num_busy, timeout_s
            )

    def close(self) -> None:
        """Drop waiting calls. Running calls continue, and threads end after them. Idempotent."""
        with self._changed:
            self._is_closed = True
        self.drop_waiting()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if self._is_closed:
                    return
                future, work = self._waiting.popleft()
                self._num_busy += 1
            if future.set_running_or_notify_cancel():
                self._call(future, work)
            with self._changed:
                self._num_busy -= 1
                self._changed.notify_all()

    def _call(self, future: Future[T], work: Callable[[], T]) -> None:
        me = threading.get_ident()
        with self._changed:
            self._progress[me] = self._clock()
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001  the submitter gets it
            self._returned(me)
            future.set_exception(error)
        else:
            self._returned(me)
            future.set_result(result)

    def _returned(self, thread: int) -> None:
        """Forget the call that has returned on this thread.

        This happens before the submitter receives the result. Otherwise `waits_since` could still
        report the call.
        """
        with self._changed:
            del self._progress[thread]

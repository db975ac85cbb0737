"""Runs a KvAgent (`agent.py`) on its own thread and event loop.

This is for a process that has no event loop, such as an engine's worker, or whose loop is busy. All
methods may be called on any thread. Methods with a result that comes later return a
`concurrent.futures.Future`, and cancelling the future of a pull cancels the pull. Event callbacks
run on the agent's thread, so they must only pass the event on to another thread. A ticket is the
right to pull one prompt's staged KV.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from pdmesh.core.instance.arena import ArenaRange
from pdmesh.core.kv.layout.buffer_layout import KvLayout
from pdmesh.core.kv.transfer.pull_parts import CHUNK_BYTES
from pdmesh.core.kv.transfer.ticket import PullFailure, Ticket
from pdmesh.errors import KvTransferFailed
from pdmesh.kv.agent.agent import KvAgent
from pdmesh.kv.agent.types import AgentStats, OnRange, PullResult
from pdmesh.kv.transport.base import ArenaBytes, KvBytes

T = TypeVar("T")


class AgentThread:
    """`make_agent` runs on the new thread, so that only that thread uses UCX.

    `die` is called if the agent's loop fails after the start and before `close`.
    """

    def __init__(
        self,
        make_agent: Callable[[], KvAgent],
        name: str = "kv-agent",
        die: Callable[[BaseException], None] = lambda _: None,
    ) -> None:
        self._die = die
        self._make_agent = make_agent
        self._agent: KvAgent | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._started: Future[str] = Future()
        self._is_closing = False
        self._handed: set[_HandedPull[Any]] = set()  # pulls whose futures are not done

    def start(self, timeout_s: float = 30.0) -> str:
        """Block until the agent listens. Returns its address.

        Raises TimeoutError, or the error of `make_agent` or `KvAgent.start`.
        """
        self._thread.start()
        return self._started.result(timeout_s)

    def staging(self, r: ArenaRange) -> ArenaBytes:
        return self._running().staging(r)

    def landing(self, r: ArenaRange) -> ArenaBytes:
        return self._running().landing(r)

    def open(
        self,
        ticket_id: str,
        attempt: int,
        r: ArenaRange,
        layout: KvLayout,
        lease_s: float,
        *,
        chunk_bytes: int | None = None,
    ) -> Future[None]:
        """Like `KvAgent.open`. The future raises the ValueError of `KvAgent.open`.

        A pull that arrives after this call finds the ticket, even if the future is not done.
        """
        agent = self._running()
        return self._post(
            lambda: agent.open(ticket_id, attempt, r, layout, lease_s, chunk_bytes=chunk_bytes)
        )

    def ready(self, ticket_id: str, num_layers: int) -> None:
        """Like `KvAgent.ready`. Only layers that complete a part of a pull wake the thread."""
        agent = self._running()
        if agent.completes_part(ticket_id, num_layers):
            agent.post(lambda: agent.ready(ticket_id, num_layers))

    def stage(
        self,
        ticket_id: str,
        attempt: int,
        r: ArenaRange,
        layout: KvLayout,
        lease_s: float,
        *,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> Future[None]:
        """Like `KvAgent.stage`. The future raises the ValueError of `KvAgent.stage`.

        A pull that arrives after this call finds the ticket, even if the future is not done.
        """
        agent = self._running()
        return self._post(
            lambda: agent.stage(ticket_id, attempt, r, layout, lease_s, chunk_bytes=chunk_bytes)
        )

    def release(self, ticket_id: str) -> None:
        agent = self._running()
        agent.post(lambda: agent.release(ticket_id))

    def keep(self, ticket: Ticket, for_s: float) -> Future[None]:
        return self._submit(self._running().keep(ticket, for_s))

    def stop_renewing(self, ticket_id: str) -> None:
        agent = self._running()
        agent.post(lambda: agent.stop_renewing(ticket_id))

    def expect(self, ticket_id: str, stall_s: float) -> None:
        agent = self._running()
        agent.post(lambda: agent.expect(ticket_id, stall_s))

    def stats(self) -> AgentStats:
        """The counters. They may be a moment old, because this does not wait for the thread."""
        return self._running().stats()

    def pull(
        self,
        ticket: Ticket,
        landing: ArenaRange,
        *,
        deadline_s: float,
        first_block: int = 0,
        on_range: OnRange | None = None,
        source_rank: int | None = None,
        heads: tuple[int, int] | None = None,
        num_takers: int = 1,
        leg: int = 0,
        stall_s: float = math.inf,
        on_silent: Callable[[], None] = lambda: None,
    ) -> Future[PullResult]:
        """Like `KvAgent.pull`. The future raises the same errors.

        Cancelling the future cancels the pull, and AgentLandingFreed follows.
        """
        agent = self._made()

        async def pull() -> PullResult:
            return await agent.pull(
                ticket,
                landing,
                deadline_s=deadline_s,
                first_block=first_block,
                on_range=on_range,
                source_rank=source_rank,
                heads=heads,
                num_takers=num_takers,
                leg=leg,
                stall_s=stall_s,
                on_silent=on_silent,
            )

        return self._hand_over(pull, lambda: agent.give_back(landing))

    def fetch(
        self,
        address: str,
        incarnation: int,
        names: Sequence[bytes],
        targets: Sequence[KvBytes],
        *,
        deadline_s: float,
        on_freed: Callable[[], None],
        source: str = "",
    ) -> Future[Sequence[bytes]]:
        """Like `KvAgent.fetch`.

        `on_freed` runs on the agent's thread, or on the caller's thread if the agent has ended.
        """
        agent = self._made()

        async def fetch() -> Sequence[bytes]:
            return await agent.fetch(
                address,
                incarnation,
                names,
                targets,
                deadline_s=deadline_s,
                on_freed=on_freed,
                source=source,
            )

        # A complete fetch has called `on_freed` already, even if its result is not taken.
        return self._hand_over(fetch, on_freed, is_freed_by_result=True)

    def probe(
        self, addresses: Sequence[str], incarnation: int, *, deadline_s: float, source: str = ""
    ) -> Future[None]:
        """Call `KvAgent.probe` for each rank of a peer in turn. One deadline applies to all."""
        agent = self._running()
        deadline = time.monotonic() + deadline_s

        async def probe_all() -> None:
            for address in addresses:
                left_s = max(0.0, deadline - time.monotonic())
                await agent.probe(address, incarnation, deadline_s=left_s, source=source)

        return self._submit(probe_all())

    def disconnect(self, address: str) -> None:
        agent = self._running()
        agent.post(lambda: agent.disconnect(address))

    def close(self, timeout_s: float = 5.0) -> None:
        """Close the agent, and wait at most `timeout_s` for its thread to end. Idempotent."""
        if self._is_closing or not self._thread.is_alive():
            return
        self._is_closing = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._agent = self._make_agent()
            self._started.set_result(self._loop.run_until_complete(self._agent.start()))
        except BaseException as exc:  # noqa: BLE001  handed over to `start`
            self._started.set_exception(exc)
        else:
            self._turn(self._agent)
        finally:
            self._loop.close()
            for handed in list(self._handed):
                handed.refuse()

    def _turn(self, agent: KvAgent) -> None:
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._wind_up(agent))
        except BaseException as error:
            if not self._is_closing:
                self._die(error)
            raise

    @staticmethod
    async def _wind_up(agent: KvAgent) -> None:
        await agent.close()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def _running(self) -> KvAgent:
        if self._agent is None or self._is_closing:
            raise KvTransferFailed("the KV agent is not running", reason=PullFailure.CLOSING)
        return self._agent

    def _made(self) -> KvAgent:
        assert self._agent is not None, "start() has not returned"
        return self._agent

    def _post(self, what: Callable[[], None]) -> Future[None]:
        done: Future[None] = Future()

        def run() -> None:
            try:
                what()
            except Exception as exc:  # noqa: BLE001  handed to the caller
                done.set_exception(exc)
            else:
                done.set_result(None)

        self._running().post(run)
        return done

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError as exc:  # the loop is closed
            work.close()
            raise KvTransferFailed("the KV agent is closed", reason=PullFailure.CLOSING) from exc

    def _hand_over(
        self,
        work: Callable[[], Coroutine[Any, Any, T]],
        give_back: Callable[[], None],
        is_freed_by_result: bool = False,
    ) -> Future[T]:
        pull = _HandedPull(work, self._loop, give_back, is_freed_by_result)
        self._handed.add(pull)
        pull.future.add_done_callback(lambda _: self._handed.discard(pull))
        try:
            self._loop.call_soon_threadsafe(pull.begin)
        except RuntimeError:  # the loop is closed
            pull.refuse()
        return pull.future


class _HandedPull(Generic[T]):
    """A pull that another thread asked for, and the task that runs it on the agent's loop.

    The caller has reserved the range that the pull writes to. If the pull succeeds, the caller
    keeps the range. If it fails, the agent gives the range back, except in two cases. The task may
    be cancelled before its first step, and then it runs no code of the agent. Or the caller may
    cancel when the task is already done. In both cases this class gives the range back.
    """

    def __init__(
        self,
        work: Callable[[], Coroutine[Any, Any, T]],
        loop: asyncio.AbstractEventLoop,
        give_back: Callable[[], None],
        is_freed_by_result: bool,
    ) -> None:
        self.future: Future[T] = Future()
        self._work, self._loop, self._give_back = work, loop, give_back
        self._is_freed_by_result = is_freed_by_result
        self._has_begun = False
        self._refusing = threading.Lock()  # never released after a refusal

    def refuse(self) -> None:
        """Fail the pull because the agent's loop has ended.

        If the pull never began, this gives the range back. Otherwise the agent has done so.
        """
        if not self._refusing.acquire(blocking=False):
            return
        if not self._has_begun:
            self._give_back()
        if not self.future.done() and self.future.set_running_or_notify_cancel():
            self.future.set_exception(
                KvTransferFailed("the KV agent is closed", reason=PullFailure.CLOSING)
            )

    async def _run(self) -> T:
        self._has_begun = True
        return await self._work()

    def begin(self) -> None:
        task = self._loop.create_task(self._run())
        task.add_done_callback(self._end)
        self.future.add_done_callback(lambda _: self._cancel(task))

    def _cancel(self, task: asyncio.Task[T]) -> None:
        if self.future.cancelled():
            with contextlib.suppress(RuntimeError):  # the loop is closed, and so is the agent
                self._loop.call_soon_threadsafe(task.cancel)

    def _end(self, task: asyncio.Task[T]) -> None:
        if not self._has_begun:
            self._give_back()
        if task.cancelled():
            self.future.cancel()
        has_taker = self.future.set_running_or_notify_cancel()
        error = None if task.cancelled() else task.exception()
        if error is not None:
            if has_taker:
                self.future.set_exception(error)
        elif has_taker:
            self.future.set_result(task.result())
        elif not (task.cancelled() or self._is_freed_by_result):
            self._give_back()

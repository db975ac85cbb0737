"""Elects one leader among the processes of a service, by a lease in JetStream.

The lease is a key in the bucket `pdmesh-leader`. Of several attempts to win, only the first write
succeeds, because each write names the revision that it replaces. `core.control.leadership` decides
when a leadership is over. A standby is notified at once when the lease expires or is given up. It
also tries every third of a lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable
from typing import Final

import structlog

from pdmesh.core.control.leadership import Leadership
from pdmesh.errors import Unavailable
from pdmesh.net.nats.buckets import LEADER
from pdmesh.net.nats.bus import NatsBus
from pdmesh.net.nats.kv_bucket import KvBucket, KvEntry, WrongRevision
from pdmesh.net.tasks import end, together

log = structlog.get_logger(__name__)

_TICKS_PER_LEASE: Final = 12


class LeaderElection:
    """One process's part in the election.

    `on_change(is_leader, epoch)` is called when the leadership of this process or its epoch
    changes. The epoch is the number of a leadership. It grows with each election, mostly by more
    than one, because it is at least the lease's revision, which renewals also raise. `num_won`
    counts the elections that this process has won.
    """

    def __init__(
        self,
        bus: NatsBus,
        role: str,
        candidate_id: str,
        incarnation: int,
        lease_s: float,
        on_change: Callable[[bool, int], None],
    ) -> None:
        self._bucket = KvBucket(bus, LEADER, ttl_s=lease_s)
        self._role = role
        self._name = json.dumps(
            {"instanceId": candidate_id, "incarnation": str(incarnation)}
        ).encode()
        self._lease_s = lease_s
        self._on_change = on_change
        self._state = Leadership(lease_s)
        self._revision = 0
        self.num_won = 0
        self._is_vacant = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def is_leader(self) -> bool:
        return self._state.is_leader(time.monotonic())

    @property
    def epoch(self) -> int:
        return self._state.epoch

    def saw_epoch(self, epoch: int) -> None:
        """Note an epoch in another process's record.

        If this process leads, it raises its own epoch above that epoch.
        """
        if self._state.saw(epoch, time.monotonic()):
            log.warning("leader.epoch_raised", seen=epoch, epoch=self.epoch)
            self._on_change(True, self.epoch)

    def start(self) -> asyncio.Task[None]:
        """Start the campaign. The task ends only by failing."""
        self._task = asyncio.create_task(self._run(), name="leader-election")
        return self._task

    async def stop(self) -> None:
        """Give up the lease, so that a standby takes over at once."""
        if self._task is not None:
            await end([self._task])
        if self.is_leader:
            self._ended("stopped")
            with contextlib.suppress(Unavailable, WrongRevision):
                await self._give_up()

    async def _give_up(self) -> None:
        try:
            await self._bucket.delete(self._role, last=self._revision)
        # A cancelled renewal may have reached the store and raised the revision.
        except WrongRevision:
            found = await self._get()
            if found is not None and found.value == self._name:
                await self._bucket.delete(self._role, last=found.revision)

    async def _run(self) -> None:
        watch = self._bucket.watch(self._on_entry, self._is_vacant.set, lambda: None)
        try:
            await together(self._fence_often(), self._campaign())
        finally:
            await watch.close()

    def _on_entry(self, entry: KvEntry) -> None:
        if entry.key != self._role:
            return
        if entry.value is None:
            self._state.vacated()
            self._is_vacant.set()
        elif entry.value != self._name:
            self._state.other_holds(time.monotonic())

    async def _fence_often(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / _TICKS_PER_LEASE)
            if self._state.tick(time.monotonic()):
                self._ended("fenced")

    async def _campaign(self) -> None:
        while True:
            try:
                await (self._renew() if self.is_leader else self._try_to_win())
            except Unavailable as exc:
                log.debug("leader.unavailable", error=exc.message)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._lease_s / 3):
                    await self._is_vacant.wait()
            self._is_vacant.clear()

    async def _try_to_win(self) -> None:
        found = await self._get()
        is_own = found is not None and found.value == self._name
        if found is not None and found.value is not None and not is_own:
            self._state.other_holds(time.monotonic())
            return
        asked_at = time.monotonic()
        if found is None and not self._state.may_win(asked_at):
            return
        with contextlib.suppress(WrongRevision):
            last = found.revision if found else 0
            self._revision = await self._bucket.put(self._role, self._name, last=last)
            epoch = self._state.won(self._revision, asked_at)
            self.num_won += 1
            log.info("leader.won", epoch=epoch)
            self._on_change(True, epoch)

    async def _renew(self) -> None:
        asked_at = time.monotonic()
        try:
            self._revision = await self._bucket.put(self._role, self._name, last=self._revision)
        except WrongRevision:
            found = await self._get()
            if found is not None and found.value == self._name:
                self._revision = found.revision  # our write arrived, but its answer did not
                self._state.renewed(asked_at)
            else:
                self._state.lost()
                self._ended("taken")
            return
        self._state.renewed(asked_at)

    async def _get(self) -> KvEntry | None:
        try:
            return await self._bucket.get(self._role)
        except Unavailable:
            await self._bucket.ensure()
            return await self._bucket.get(self._role)

    def _ended(self, why: str) -> None:
        self._state.lost()
        log.warning("leader.ended", why=why, epoch=self.epoch)
        self._on_change(False, self.epoch)

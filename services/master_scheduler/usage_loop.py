"""Counts how long instances are used, and for which groups, while this master leads (S22).

The counts are stored in NATS, and the next leader continues from them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

import structlog

from pdmesh.core.billing.accounts import Account, accounts_of
from pdmesh.core.billing.instance_usage import UsageBook, Used
from pdmesh.core.groups.cluster_state import Observed
from pdmesh.errors import InvalidRequest, Unavailable, VersionConflict
from pdmesh.net.nats.usage_store import UsageStore
from pdmesh.services.master_scheduler.groups.reconciler import GroupReconciler
from pdmesh.telemetry import metrics, names
from pdmesh.v1 import admin_service_pb2 as pb

log = structlog.get_logger(__name__)

_TICK_S: Final = 0.25
_SAVE_S: Final = 10.0  # longest time between two saves; a changed number is saved at once


class UsageLoop:
    """Counts and stores the usage.

    `leadership` returns whether this process leads now, and its epoch. `wall` is unix time.
    """

    def __init__(
        self,
        groups: GroupReconciler,
        store: UsageStore,
        leadership: Callable[[], tuple[bool, int]],
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._groups, self._store, self._leadership = groups, store, leadership
        self._clock, self._wall = clock, wall
        self._book: UsageBook | None = None  # None unless this master leads
        self._epoch = 0
        self._since = 0.0
        self._observed: Observed | None = None
        self._nums: dict[Account, int] = {}
        self._saved_at = 0.0
        self._is_changed = False

    async def run(self) -> None:
        """Runs until cancelled."""
        self._observe_metrics()
        while True:
            try:
                await self.round()
            except (Unavailable, VersionConflict) as exc:
                log.info("usage.unavailable", error=exc.message)
            except Exception:  # a bug here must not end the planning of requests
                log.exception("usage.bug")
            await asyncio.sleep(_TICK_S)

    async def round(self) -> None:
        is_leader, epoch = self._leadership()
        if not is_leader:
            self._book = None
            return
        observed, current = self._groups.observed, self._groups.current
        if observed is None or current is None or observed.epoch != epoch:
            return  # nothing new is known, so the last numbers of instances stay valid
        if observed is not self._observed:
            self._observed, before = observed, self._nums
            self._nums = dict(accounts_of(observed, *current))
            self._is_changed = self._is_changed or self._nums != before
        if self._book is None or self._epoch != epoch:
            await self._resume(epoch)
        elif self._is_changed:
            self._book.look(self._nums, self._clock())
        if self._is_changed or self._clock() - self._saved_at >= _SAVE_S:
            await self._save()

    def message(self) -> pb.UsageBook:
        """The usage up to now.

        Raises Unavailable if this master does not lead, or has not read the earlier leader's counts
        yet. Raises InvalidRequest if no desired state was ever applied, because nothing is counted
        until then.
        """
        if self._groups.view.version is None:
            raise InvalidRequest("nothing is counted until a desired state is applied")
        if self._book is None or not self._leadership()[0]:
            raise Unavailable("this leader has not read the usage book yet")
        message = pb.UsageBook(epoch=self._epoch, accounts=map(_to, self._book.used(self._clock())))
        message.since.FromMicroseconds(round(self._since * 1e6))
        message.as_of.FromMicroseconds(round(self._wall() * 1e6))
        return message

    async def _resume(self, epoch: int) -> None:
        stored, book, now = await self._store.load(), UsageBook(), self._wall()
        if stored is None:
            self._since = now
            book.look(self._nums, self._clock())
        else:
            self._since = stored.since.ToMicroseconds() / 1e6
            away_s = now - stored.as_of.ToMicroseconds() / 1e6
            book.resume(map(_from, stored.accounts), away_s, self._nums, self._clock())
            log.info("usage.resumed", away_s=away_s, epoch=stored.epoch)
        self._book, self._epoch, self._is_changed = book, epoch, True

    async def _save(self) -> None:
        try:
            await self._store.save(self.message())
        except (
            VersionConflict
        ):  # an earlier leader wrote the counts, or the bucket was wiped (F21); ours are newer
            await self._store.load()
            raise
        self._saved_at, self._is_changed = self._clock(), False

    def _observe_metrics(self) -> None:
        def seconds() -> list[tuple[float, dict[str, str]]]:
            used = self._book.used(self._clock()) if self._book is not None else []
            return [
                (
                    each.instance_s,
                    {
                        "service": each.account.service,
                        "scenario": each.account.scenario,
                        "group": each.account.group_id,
                        "pool": each.account.pool,
                    },
                )
                for each in used
            ]

        metrics.total(
            names.USAGE,
            "Seconds of instance time, by service, scenario, group and pool",
            seconds,
            "s",
        )


def _to(used: Used) -> pb.UsageAccount:
    account = used.account
    return pb.UsageAccount(
        service=account.service,
        scenario=account.scenario,
        group_id=account.group_id,
        pool=account.pool,
        instance_s=used.instance_s,
        num_instances=used.num_instances,
    )


def _from(message: pb.UsageAccount) -> Used:
    account = Account(message.service, message.scenario, message.group_id, message.pool)
    return Used(account, message.instance_s, message.num_instances)

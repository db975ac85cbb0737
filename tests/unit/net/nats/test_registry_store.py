"""Tests when a view takes an expired record for the death of its process.

While the bucket refuses writes, no process can renew its record, so none counts as dead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pdmesh.errors import Unavailable
from pdmesh.net.nats import registry
from pdmesh.net.nats.kv_bucket import KvEntry
from pdmesh.net.nats.registry import NatsRegistry
from pdmesh.net.registry import RecordChanged
from pdmesh.v1.common_pb2 import InstanceRecord
from tests.support.waiting import until

LEASE_S = 0.3


class Bus:
    """A NATS server that always answers."""

    is_connected, stable_since = True, 0.0

    def on_restored(self, callback: Callable[[], None]) -> Callable[[], None]:
        return lambda: None


class Bucket:
    """A bucket of a NATS cluster, which may have no leader."""

    def __init__(self) -> None:
        self.has_leader = True
        self.num_refused = 0
        self._revision = 0
        self.on_entry: Callable[[KvEntry], None] = lambda _: None
        self.kept: dict[str, KvEntry] = {}
        self.asked: list[str] = []
        self.is_live = True

    async def ensure(self) -> None:
        pass

    async def get(self, key: str) -> KvEntry | None:
        self.asked.append(key)
        return self.kept.get(key)

    async def put(self, key: str, value: bytes, last: int | None = None) -> int:
        if not self.has_leader:
            self.num_refused += 1
            raise Unavailable("no leader")
        self._revision += 1
        self.kept[key] = KvEntry(key, value, self._revision)
        self.on_entry(self.kept[key])
        return self._revision

    async def delete(self, key: str, last: int | None = None) -> int:
        return 0

    def watch(self, on_entry: Any, on_loaded: Callable[[], None], on_reset: Any) -> Bucket:
        self.on_entry = on_entry
        on_loaded()
        return self

    async def close(self) -> None:
        pass


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """The bucket that every registry in the test uses."""
    made = Bucket()
    monkeypatch.setattr(registry, "KvBucket", lambda *_, **__: made)
    return made


def record_of(name: str) -> bytes:
    return b'{"instanceId": "%s", "incarnation": "7"}' % name.encode()


@pytest.mark.fault("F18")
async def test_expired_records_are_judged_only_a_lease_after_writes_are_taken_again(
    bucket: Bucket,
) -> None:
    mesh = NatsRegistry(Bus(), LEASE_S)  # type: ignore[arg-type]
    view = await mesh.watch()
    gone: list[str] = []
    view.on_change(lambda change: None if change.record else gone.append(change.instance_id))
    lease = await mesh.register(InstanceRecord(instance_id="me", incarnation=1))
    bucket.on_entry(KvEntry("other", record_of("other"), 100))

    bucket.has_leader = False
    await until(lambda: bucket.num_refused >= 2)
    for name in ("me", "other"):  # the next leader of the cluster reports both as expired
        bucket.on_entry(KvEntry(name, None, 200, is_expired=True))
    seen = bucket.num_refused
    await until(lambda: bucket.num_refused >= seen + 4)  # this takes longer than a lease
    assert gone == []

    bucket.has_leader = True
    await until(lambda: lease.is_held)
    await until(lambda: gone == ["other"])
    assert set(view.records) == {"me"}
    await lease.release()
    await view.close()
    await asyncio.sleep(0)


async def test_a_record_that_nobody_renews_is_asked_for_and_gone_once_the_server_says_so(
    bucket: Bucket,
) -> None:
    """The server does not report the end of a lease."""
    view = await NatsRegistry(Bus(), LEASE_S).watch()  # type: ignore[arg-type]
    gone: list[str] = []
    view.on_change(lambda change: None if change.record else gone.append(change.instance_id))
    for name in ("dead", "slow"):
        await bucket.put(name, record_of(name))

    await until(lambda: bucket.asked.count("dead") >= 2)
    assert set(view.records) == {"dead", "slow"}, "the server still has them"

    del bucket.kept["dead"]
    await until(lambda: gone == ["dead"])
    assert set(view.records) == {"slow"}
    seen = bucket.asked.count("dead")
    await until(lambda: bucket.asked.count("slow") >= 5)
    assert bucket.asked.count("dead") == seen, "once judged, it is not asked for again"
    await view.close()


async def test_nothing_is_asked_while_the_watch_is_not_live(
    bucket: Bucket,
) -> None:
    """When the watch is live again, it shows all entries."""
    view = await NatsRegistry(Bus(), LEASE_S).watch()  # type: ignore[arg-type]
    bucket.is_live = False
    await bucket.put("other", record_of("other"))
    bucket.kept.clear()
    # to show that nothing happens, there is no condition to wait for
    await asyncio.sleep(3 * LEASE_S)
    assert bucket.asked == []
    bucket.is_live = True
    await until(lambda: not view.records)
    await view.close()


async def test_a_listener_that_fails_keeps_no_death_from_the_others(
    bucket: Bucket,
) -> None:
    view = await NatsRegistry(Bus(), LEASE_S).watch()  # type: ignore[arg-type]
    gone: list[str] = []

    def fail(change: RecordChanged) -> None:
        if change.record is None:
            raise ValueError(change.instance_id)

    view.on_change(fail)
    view.on_change(lambda change: None if change.record else gone.append(change.instance_id))
    for name in "ab":
        await bucket.put(name, record_of(name))
    for name in "ab":  # they die one after another
        del bucket.kept[name]
        await until(lambda: name in gone)  # noqa: B023
    await view.close()


async def test_a_view_behind_its_watch_does_not_ask_over_and_over_for_what_is_renewed(
    bucket: Bucket,
) -> None:
    view = await NatsRegistry(Bus(), 2.0).watch()  # type: ignore[arg-type]
    for name in ("same", "renewed"):
        await bucket.put(name, record_of(name))
    # the view has not yet seen the renewal
    bucket.kept["renewed"] = replace(bucket.kept["renewed"], revision=99)
    await until(lambda: bucket.asked.count("same") >= 4)  # at 2.0, 2.25, 2.75 and 3.75 s
    assert bucket.asked.count("renewed") <= 2  # at 2.0, and perhaps at 4.0 s
    assert set(view.records) == {"same", "renewed"}
    await view.close()

"""When a view takes an expired record for a dead process: not while its bucket takes no writes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from pdmesh.errors import Unavailable
from pdmesh.net.nats import registry
from pdmesh.net.nats.kv_bucket import KvEntry
from pdmesh.net.nats.registry import NatsRegistry
from pdmesh.v1.common_pb2 import InstanceRecord
from tests.support.waiting import until

LEASE_S = 0.3


class Bus:
    """A server that answers all the time."""

    is_connected, stable_since = True, 0.0

    def on_restored(self, callback: Callable[[], None]) -> Callable[[], None]:
        return lambda: None


class Bucket:
    """A bucket of a cluster, which may have no leader."""

    def __init__(self) -> None:
        self.has_leader = True
        self.num_refused = 0
        self._revision = 0
        self.on_entry: Callable[[KvEntry], None] = lambda _: None

    async def ensure(self) -> None:
        pass

    async def get(self, key: str) -> KvEntry | None:
        return None

    async def put(self, key: str, value: bytes, last: int | None = None) -> int:
        if not self.has_leader:
            self.num_refused += 1
            raise Unavailable("no leader")
        self._revision += 1
        self.on_entry(KvEntry(key, value, self._revision))
        return self._revision

    async def delete(self, key: str, last: int | None = None) -> int:
        return 0

    def watch(self, on_entry: Any, on_loaded: Callable[[], None], on_reset: Any) -> Bucket:
        self.on_entry = on_entry
        on_loaded()
        return self

    async def close(self) -> None:
        pass


@pytest.mark.fault("F18")
async def test_expired_records_are_judged_only_a_lease_after_writes_are_taken_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bucket = Bucket()
    monkeypatch.setattr(registry, "KvBucket", lambda *_, **__: bucket)
    mesh = NatsRegistry(Bus(), LEASE_S)  # type: ignore[arg-type]
    view = await mesh.watch()
    gone: list[str] = []
    view.on_change(lambda change: None if change.record else gone.append(change.instance_id))
    lease = await mesh.register(InstanceRecord(instance_id="me", incarnation=1))
    bucket.on_entry(KvEntry("other", b'{"instanceId": "other", "incarnation": "7"}', 100))

    bucket.has_leader = False
    await until(lambda: bucket.num_refused >= 2)
    for name in ("me", "other"):  # as the next leader reports it
        bucket.on_entry(KvEntry(name, None, 200, is_expired=True))
    seen = bucket.num_refused
    await until(lambda: bucket.num_refused >= seen + 4)  # longer than a lease
    assert gone == []

    bucket.has_leader = True
    await until(lambda: lease.is_held)
    await until(lambda: gone == ["other"])
    assert set(view.records) == {"me"}
    await lease.release()
    await view.close()
    await asyncio.sleep(0)

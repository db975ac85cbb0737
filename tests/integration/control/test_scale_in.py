"""Takes a whole group out of a mesh under load (S22). No request may fail, and no data of the group
may stay behind. The group's instance time must be charged to the second.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from redis.asyncio import Redis

from pdmesh.core.kv.tier import Tier
from pdmesh.events.v1.events_pb2 import Header, RequestFinished
from pdmesh.kv.index import redis_keys as keys
from pdmesh.launcher.mesh import Mesh
from pdmesh.launcher.spec import MeshSpec
from pdmesh.net import subjects
from pdmesh.net.bus import Message
from pdmesh.net.events import decode_event
from pdmesh.net.grpc.admin_client import call_leader
from pdmesh.net.nats.bus import NatsBus
from pdmesh.v1 import admin_service_pb2 as pb
from tests.support.sites.groups import asking
from tests.support.sites.operator import CHANGE_S, Operator
from tests.support.waiting import until

GROUPS = """
scenarios:
  default: {{allow_single: true}}
groups:
  chat: {{count: {count}, prefill: 1, decode: 1}}
"""
LEAVING = ("draining", "drained", "disconnected", "released")
CHARGED_WITHIN_S = 1.0  # the allowed error for each instance


async def usage(bus: NatsBus) -> pb.UsageBook:
    response = await call_leader(
        bus,
        "",
        lambda stub, metadata, s: stub.GetUsage(pb.GetUsageRequest(), metadata=metadata, timeout=s),
        within_s=CHANGE_S,
    )
    return response.book


async def counts_after(bus: NatsBus, epoch: int) -> bool:
    return (await usage(bus)).epoch > epoch


def account(book: pb.UsageBook, group_id: str) -> pb.UsageAccount:
    return next((a for a in book.accounts if a.group_id == group_id), pb.UsageAccount())


def wall(header: Header) -> float:
    return header.occurred_at.ToMicroseconds() / 1e6


@pytest.mark.timeout(300)
@pytest.mark.req("S21", "S22", "S26", "S36")
@pytest.mark.fault("F11")
async def test_a_group_leaves_in_order_and_is_charged_until_it_is_released(tmp_path: Path) -> None:
    spec = MeshSpec(
        engine="sim", num_prefill=0, num_decode=0, num_blank=4, num_masters=2,
        http_port=0, grpc_port=0, start_timeout_s=180,
    )  # fmt: skip
    finished: list[RequestFinished] = []
    async with Mesh(spec, tmp_path / "mesh") as mesh:
        bus = await NatsBus.connect(mesh.nats_url, "test")

        async def on_finished(message: Message) -> None:
            finished.append(decode_event(message, RequestFinished))

        await bus.subscribe(subjects.request_finished(), on_finished)
        operator = Operator(bus)
        await operator.listen()
        await operator.apply(GROUPS.format(count=2))
        await until(lambda: steps(operator, "complete") == {"chat-0", "chat-1"}, within_s=CHANGE_S)

        async with asking(mesh.http_url) as outcomes:
            await until(lambda: len(outcomes) > 10, within_s=CHANGE_S)
            epoch = (await usage(bus)).epoch
            # The next leader must continue the account.
            mesh.kill(operator.steps[0].header.publisher_id)
            # For the time between two leaders, an account is charged for the lower of the two
            # numbers of instances that the leaders saw. So the group must not leave before the new
            # leader has seen it.
            await until(lambda: counts_after(bus, epoch), within_s=CHANGE_S)
            await operator.apply(GROUPS.format(count=1))
            await until(lambda: len(times(operator, "released")) == 2, within_s=CHANGE_S)
            num = len(outcomes)
            await until(lambda: len(outcomes) > num + 10, within_s=CHANGE_S)
        assert [o for o in outcomes if not o.is_complete] == []
        await until(lambda: len(finished) >= len(outcomes), within_s=CHANGE_S)

        gone = times(operator, "released")
        for instance_id in gone:
            order = [times(operator, step)[instance_id] for step in LEAVING]
            assert all(a <= b for a, b in pairwise(order))
            assert last_request_at(finished, instance_id) <= times(operator, "drained")[instance_id]
        redis = Redis.from_url(mesh.redis_url)
        kept = [keys.instance_blocks(i, Tier.ENGINE) for i in gone]
        await until(lambda: has_none(redis, kept), within_s=CHANGE_S)
        await redis.aclose()

        assigned = times(operator, "assigned")
        used_s = sum(gone[i] - assigned[i] for i in gone)
        book = await usage(bus)
        assert account(book, "chat-1").instance_s == pytest.approx(
            used_s, abs=CHARGED_WITHIN_S * len(gone)
        )
        assert account(book, "chat-1").num_instances == 0
        stays, later = account(book, "chat-0"), await usage(bus)
        passed_s = (later.as_of.ToMicroseconds() - book.as_of.ToMicroseconds()) / 1e6
        more_s = account(later, "chat-0").instance_s - stays.instance_s
        assert more_s == pytest.approx(2 * passed_s, abs=0.1)
        assert account(later, "chat-1") == account(book, "chat-1")
        await bus.close()


def steps(operator: Operator, step: str) -> set[str]:
    """The groups that reported this step."""
    return {s.group_id for s in operator.steps if s.step == step}


def times(operator: Operator, step: str) -> dict[str, float]:
    """When each instance made this step, by the time of the leader's event."""
    return {s.instance_id: wall(s.header) for s in operator.steps if s.step == step}


def last_request_at(finished: list[RequestFinished], instance_id: str) -> float:
    """When the instance's last request began."""
    own = [f for f in finished if instance_id in (f.prefill_id, f.decode_id)]
    return max(wall(f.header) - f.e2e_ms / 1e3 for f in own)


async def has_none(redis: Redis, names: list[str]) -> bool:
    return not await redis.exists(*names)

"""Tests to which processes a client sends its admin token. Each leadership of a master has a
number, the epoch. The token may reach only the leader of the highest epoch.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pdmesh.errors import NotLeader, Unavailable
from pdmesh.net.grpc import rpc
from pdmesh.net.grpc.admin_client import call_leader
from pdmesh.net.nats.bus import NatsBus
from pdmesh.net.nats.registry import NatsRegistry
from pdmesh.v1 import admin_service_pb2 as pb
from pdmesh.v1.common_pb2 import InstanceRecord
from tests.support.sites import servers

TOKEN = "of-the-operators-only"


class Master:
    """A fake master. It answers ListGroupStates with its epoch, or refuses the call if the epoch is
    0. `tokens` holds the admin tokens that it received.
    """

    def __init__(self, epoch: int) -> None:
        self.epoch, self.tokens = epoch, list[str]()

    async def ListGroupStates(self, _: Any, context: Any) -> pb.ListGroupStatesResponse:
        self.tokens += [v for k, v in context.invocation_metadata() if k == "authorization"]
        if not self.epoch:
            raise NotLeader("not I")
        return pb.ListGroupStatesResponse(epoch=self.epoch)

    def __getattr__(self, name: str) -> Any:
        if name[0].isupper():  # serves the other methods of the service in the same way
            return self.ListGroupStates
        raise AttributeError(name)


@contextlib.asynccontextmanager
async def registered(bus: NatsBus, name: str, master: Master, epoch: int) -> AsyncIterator[None]:
    """Run the master as a server with a record in the registry. The record names it as the leader
    unless `epoch` is 0.
    """
    server = rpc.server()
    rpc.add_service(server, pb.DESCRIPTOR.services_by_name["AdminService"], master)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    record = InstanceRecord(
        instance_id=name, incarnation=1, service="master-scheduler",
        grpc_address=f"127.0.0.1:{port}",
        is_leader=epoch > 0, epoch=epoch,
    )  # fmt: skip
    lease = await NatsRegistry(bus, 30.0).register(record)
    try:
        yield
    finally:
        await lease.release()
        await server.stop(None)


@pytest.fixture
async def bus(tmp_path: Path) -> AsyncIterator[NatsBus]:
    server = servers.nats(tmp_path)
    await server.start()
    bus = await NatsBus.connect(server.url, "test")
    yield bus
    await bus.close()
    server.close()


async def ask(bus: NatsBus, within_s: float = 10.0) -> pb.ListGroupStatesResponse:
    return await call_leader(
        bus,
        TOKEN,
        lambda stub, metadata, s: stub.ListGroupStates(
            pb.ListGroupStatesRequest(), metadata=metadata, timeout=s
        ),
        within_s=within_s,
    )


async def test_the_token_is_shown_only_to_the_leader_of_the_last_epoch(bus: NatsBus) -> None:
    follower, former, leader = Master(0), Master(2), Master(3)
    async with (
        registered(bus, "master-a", follower, 0),
        registered(bus, "master-b", former, 2),
        registered(bus, "master-c", leader, 3),
    ):
        assert (await ask(bus)).epoch == 3
        assert leader.tokens == [f"Bearer {TOKEN}"]
        assert not follower.tokens
        assert not former.tokens


async def test_while_no_master_leads_the_token_is_sent_to_no_process(bus: NatsBus) -> None:
    follower = Master(0)
    async with registered(bus, "master-a", follower, 0):
        with pytest.raises(Unavailable, match="no master leads"):
            await ask(bus, within_s=0.5)
        assert not follower.tokens

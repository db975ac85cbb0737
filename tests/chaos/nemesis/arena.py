"""The mesh that the nemesis attacks, and the code that carries out each action.

The nemesis draws random faults and operator's orders. The arena starts NATS and Valkey itself, so
that it can kill and wipe them. Some processes reach their server through a link that can be cut.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from pdmesh import api_keys
from pdmesh.api_keys import KeyFile
from pdmesh.atomic_file import write_atomically
from pdmesh.core.tenancy.tenant import TenantEntry
from pdmesh.errors import InvalidRequest, VersionConflict
from pdmesh.launcher.mesh import Mesh
from pdmesh.launcher.spec import MeshSpec
from pdmesh.net.nats.bus import NatsBus
from pdmesh.v1.admin_service_pb2 import LEAVE_MODE_AT_ONCE, LEAVE_MODE_DRAIN, DesiredVersion
from tests.chaos.nemesis.actions import (
    Action,
    Apply,
    Cordon,
    Cut,
    DeviceFault,
    Freeze,
    Outage,
    Rollback,
    Signal,
    Slow,
    Uncordon,
)
from tests.chaos.nemesis.plan import FIRST, LINKED, NUM_INSTANCES
from tests.support.attack.link import Link
from tests.support.sites import servers
from tests.support.sites.operator import Operator
from tests.support.waiting import until

TENANTS: Final = ("acme", "umbrella")
_FAILPOINT: Final = "PDMESH_INSTANCE_FAILPOINT"
_ORDER_S: Final = 30.0  # the longest time until a leader accepts an order
_MESH: Final = "master-scheduler"  # the author of a desired state that the mesh itself has restored
_KINDS: Final = {"drain": LEAVE_MODE_DRAIN, "cordon": LEAVE_MODE_AT_ONCE}
_ENV: Final = {
    "PDMESH_INSTANCE_NUM_SLOTS": "24",  # room for all clients on one instance
    "PDMESH_TRANSFER_TIMEOUT_S": "2.0",
    "PDMESH_ENGINE_SLOW_S": "1.5",
    "PDMESH_ENGINE_HUNG_S": "5.0",
    "PDMESH_HEALTH_MONITOR_CANARY_PERIOD_S": "5.0",
    "PDMESH_NODE_AGENT_PERIOD_S": "1.0",
    # So few blocks that the engine evicts some, and loads them again from the host pool below.
    "PDMESH_INSTANCE_NUM_KV_BLOCKS": "256",
    "PDMESH_KV_HOST_POOL_BYTES": "1000000",
}


@dataclass
class Arena:
    mesh: Mesh
    servers: dict[str, servers.TestServer]
    links: dict[str, Link]
    operator: Operator
    bus: NatsBus
    keys: dict[str, str]  # API keys by tenant
    say: Callable[[str], None]
    texts: dict[int, str] = field(default_factory=lambda: {0: FIRST})  # desired states by version
    cordoned: dict[str, str] = field(default_factory=dict)  # the kind of order by instance
    num_wipes: int = 0

    @property
    def text(self) -> str:
        """The desired state of the last accepted order."""
        return self.texts[max(self.texts)]

    def follow(self, desired: DesiredVersion) -> None:
        """Accept a rollback that the mesh itself has made.

        The mesh rolls back a release that loses instances in its trial, even if the nemesis has
        killed them.
        """
        if desired.author == _MESH and desired.version not in self.texts:
            self.say(f"the mesh rolled back, version {desired.version}: {desired.reason}")
            self.texts[desired.version] = desired.text

    @property
    def log_dir(self) -> Path:
        return self.mesh.state_dir / "logs"

    async def act(self, action: Action) -> None:
        """Carry out an action.

        Returns when the fault is over, or when a leader has accepted or refused the order.
        """
        match action:
            case Signal():
                await self._signal(action)
            case Freeze(target, for_s):
                await self._freeze(target, for_s)
            case Outage():
                await self._outage(action)
            case Cut(target, for_s):
                self.links[target].cut()
                await asyncio.sleep(for_s)
                self.links[target].heal()
            case Slow(target, delay_s, for_s):
                self.links[target].delay_s = delay_s
                await asyncio.sleep(for_s)
                self.links[target].delay_s = 0.0
            case DeviceFault():
                await self._device_fault(action)
            case Apply() | Rollback() | Cordon() | Uncordon():
                await self._order(action)

    async def uncordon_the_ejected(self) -> None:
        """Uncordon ejected instances, as an operator does after a repair.

        The mesh itself never uncordons an ejected instance.
        """
        for entry in (await self.operator.groups()).out_of_service:
            if entry.instance_id not in self.cordoned:
                self.say(f"the operator uncordons {entry.instance_id} ({entry.reason})")
                with contextlib.suppress(InvalidRequest):
                    await self.operator.uncordon(entry.instance_id)

    # --- faults ----------------------------------------------------------------------------------

    async def _signal(self, action: Signal) -> None:
        name, supervisor = action.target, self.mesh.supervisor
        clean = supervisor.specs[name]
        if action.armed:
            supervisor.start(replace(clean, env={**clean.env, _FAILPOINT: action.armed}))
        pid = supervisor.pid(name)
        with contextlib.suppress(KeyError):  # the process is being restarted now
            self.mesh.kill(name, signal.Signals[action.name])
        await until(lambda: supervisor.pid(name) not in (None, pid))
        supervisor.start(clean)  # a process that dies of the failpoint comes back without it

    async def _freeze(self, name: str, for_s: float) -> None:
        if name in self.servers:
            self.servers[name].pause()
            await asyncio.sleep(for_s)
            self.servers[name].resume()
            return
        pid = self.mesh.supervisor.pid(name)
        if pid is not None:
            self.mesh.kill(name, signal.SIGSTOP)
            await asyncio.sleep(for_s)
            with contextlib.suppress(ProcessLookupError):  # the process has been replaced
                os.kill(pid, signal.SIGCONT)

    async def _outage(self, action: Outage) -> None:
        server = self.servers[action.target]
        server.kill()
        if action.is_wiped:
            self.num_wipes += 1
            server.wipe()
        await asyncio.sleep(action.for_s)
        await server.start()

    async def _device_fault(self, action: DeviceFault) -> None:
        path = self.mesh.state_dir / "devices" / f"{action.target}.json"
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, f'{{"level": {action.level}, "reason": "DEVICE_FAULT"}}')
        await asyncio.sleep(action.for_s)
        path.unlink()

    # --- an operator's orders --------------------------------------------------------------------

    async def _order(self, action: Apply | Rollback | Cordon | Uncordon) -> None:
        """Give an order. It is repeated if its answer is lost.

        A refusal is only reported, because the first attempt may have been carried out.
        """
        try:
            match action:
                case Apply(_, text):
                    self.texts[(await self.operator.apply(text)).version] = text
                case Rollback():
                    await self._roll_back()
                case Cordon(target, kind):
                    self.cordoned[target] = kind
                    await self.operator.cordon(target, _KINDS[kind])
                case Uncordon(target):
                    self.cordoned.pop(target, None)
                    await self.operator.uncordon(target)
        except (InvalidRequest, VersionConflict) as exc:
            self.say(f"refused: {action}: {exc.message}")

    async def _roll_back(self) -> None:
        """Roll back to a version by its number, so that a repeated order has the same effect."""
        current = await self.operator.desired()
        if current.version > 1:
            text = (await self.operator.desired(current.version - 1)).text
            done = await self.operator.rollback(current.version - 1)
            self.texts[done.version] = text


@contextlib.asynccontextmanager
async def arena(directory: Path, say: Callable[[str], None]) -> AsyncIterator[Arena]:
    """Start the mesh with the first desired state."""
    nats, valkey = servers.nats(directory), servers.valkey(directory)
    groups_file, keys_file = directory / "groups.yaml", directory / "keys.json"
    groups_file.write_text(FIRST)
    file = KeyFile(tenants={tenant: TenantEntry() for tenant in TENANTS})
    keys = {tenant: api_keys.issue(file, tenant) for tenant in TENANTS}
    api_keys.save(keys_file, file)
    async with contextlib.AsyncExitStack() as stack:
        for server in (nats, valkey):
            stack.callback(server.close)
            await server.start()
        links = {
            name: await stack.enter_async_context(
                Link(valkey.url if name == "kv-cache-index" else nats.url)
            )
            for name in LINKED
        }
        spec = MeshSpec(
            engine="sim",
            num_prefill=0,
            num_decode=0,
            num_blank=NUM_INSTANCES,
            num_masters=2,
            num_gateways=2,
            node_agent=True,
            groups_file=groups_file,
            keys_file=keys_file,
            nats_url=nats.url,
            redis_url=valkey.url,
            http_port=0,
            grpc_port=0,
            start_timeout_s=120,
            env=_ENV,
            service_env={
                "gateway-1": {"PDMESH_KV_TRANSFER": "per_layer"},
                **{name: {_url_setting(name): link.url} for name, link in links.items()},
            },
        )
        mesh = await stack.enter_async_context(Mesh(spec, directory / "mesh", report=say))
        bus = await NatsBus.connect(nats.url, "nemesis")
        stack.push_async_callback(bus.close)
        operator = Operator(bus, _ORDER_S)
        await operator.listen()
        yield Arena(mesh, {"nats": nats, "valkey": valkey}, links, operator, bus, keys, say)


def _url_setting(name: str) -> str:
    return "PDMESH_REDIS_URL" if name == "kv-cache-index" else "PDMESH_NATS_URL"

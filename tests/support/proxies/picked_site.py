"""Two gateways with endpoint pickers, a master and fake instances in this process, behind Envoy.

An endpoint picker tells Envoy which gateway takes a request.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from pdmesh.embedded.ports import PortReservation
from pdmesh.events.v1.events_pb2 import RequestFinished
from pdmesh.net.tls.certificate_renewal import CertificateFolder
from pdmesh.net.tls.own_certificate import using_certificates
from pdmesh.services.gateway.access.access_control import AccessControl
from pdmesh.services.gateway.gateway import Gateway
from pdmesh.services.gateway.routing.fleet import MeshView
from pdmesh.services.gateway.settings import Settings
from pdmesh.services.gateway.text.tokenizer_pool import TokenizerPool
from pdmesh.v1 import scheduler_service_pb2 as pb
from pdmesh.v1.common_pb2 import InstanceRecord
from pdmesh.v1.instance_service_pb2 import Prefill
from tests.fakes.fake_master import FakeMaster, leader_at, serving
from tests.fakes.gateway_mesh import GatewayMesh, gateway_mesh
from tests.fakes.memory_registry import MemoryView
from tests.support.proxies.envoy import Config, Envoy, picker_config
from tests.support.waiting import until

SECRET = "a-hash-secret-of-the-test"


@dataclass
class PlacingMaster(FakeMaster):
    """A master that places prompts by their prefixes, as a real master does with KV events.

    A plan ranks first the prefill that earlier plans ranked first for the longest known beginning
    of the prompt. Prompts without a known beginning are distributed over the prefills in turn.
    `queries` has all queries so far.
    """

    mesh: GatewayMesh
    queries: list[pb.PlanQuery] = field(default_factory=list)
    pressures: list[pb.ScenarioPressure] = field(default_factory=list)
    error: tuple[str, str] = ("", "")
    _holder: dict[bytes, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()

    async def Plan(self, request: pb.PlanRequest, context: Any) -> pb.PlanResponse:
        self.queries.extend(request.queries)
        results = [self._placed(query) for query in request.queries]
        return pb.PlanResponse(epoch=1, results=results, pressures=self.pressures)

    def _placed(self, query: pb.PlanQuery) -> pb.PlanResult:
        if self.error[0]:
            return pb.PlanResult(error_reason=self.error[0], error_message=self.error[1])
        out = set(query.excluded_instance_ids)
        records = [r for _, r in sorted(self.mesh.store.records.items()) if r.role]
        prefills = [r for r in records if r.service == "prefill" and r.instance_id not in out]
        decodes = [r for r in records if r.service == "decode" and r.instance_id not in out]
        if not prefills:
            return pb.PlanResult(error_reason="NO_INSTANCE", error_message="no prefill is there")
        known = [self._holder[h] for h in query.block_hashes if h in self._holder]
        turn = len(self.queries) % len(prefills)
        first = known[-1] if known else prefills[turn].instance_id
        prefills.sort(key=lambda r: r.instance_id != first)
        for name in query.block_hashes:
            self._holder.setdefault(name, first)
        pair = next((r.region for r in prefills), "")
        decodes.sort(key=lambda r: r.region != pair)
        return pb.PlanResult(
            request_id=query.request_id,
            prefills=[_candidate(r, 16 * len(known)) for r in prefills],
            decodes=[_candidate(r, 0) for r in decodes],
            prompt_compute_ms=40,
        )


def _candidate(record: InstanceRecord, num_matched_tokens: int) -> pb.Candidate:
    return pb.Candidate(
        instance_id=record.instance_id,
        incarnation=record.incarnation,
        num_matched_tokens=num_matched_tokens,
    )


class Served:
    """Stands in for a gateway's publisher, and keeps the requests that the gateway has served."""

    def __init__(self) -> None:
        self.finished: list[RequestFinished] = []

    async def publish(self, subject: str, message: Any) -> None:
        if isinstance(message, RequestFinished):
            self.finished.append(message)


@dataclass
class PickedSite:
    mesh: GatewayMesh
    master: PlacingMaster
    gateways: list[Gateway]
    served: list[Served]
    envoy: Envoy
    client: httpx.AsyncClient

    async def ask(self, prompt: str = "abc", path: str = "/v1/completions", **more: Any) -> Any:
        """Send a completion through Envoy, and return the response."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, **more}
        return await self.client.post(path, json=body)

    def record(self, number: int, **changes: Any) -> None:
        """Write the registry's record of a gateway, with changes."""
        self.mesh.register(gateway_record(self.gateways[number], number, **changes))

    def prefills(self) -> list[Prefill]:
        """All prompts that the gateways have sent to prefills."""
        return [p for i in self.mesh.instances.values() for p in i.prefills]

    def num_served(self) -> list[int]:
        return [len(each.finished) for each in self.served]


def gateway_record(gateway: Gateway, number: int, **changes: Any) -> InstanceRecord:
    values: dict[str, Any] = {
        "instance_id": f"gateway-{number}",
        "incarnation": 1,
        "service": "gateway",
        "http_address": f"127.0.0.1:{gateway.http.port}",
    }
    return InstanceRecord(**(values | changes))


@asynccontextmanager
async def picked_site(
    folder: Path,
    change: Callable[[Config], None] = lambda _: None,
    *,
    allowed: Callable[[list[str]], Callable[[Config], None]] | None = None,
    access: AccessControl | None = None,
    certificates: CertificateFolder | None = None,
    **settings: Any,
) -> AsyncIterator[PickedSite]:
    """Start the site.

    `certificates` gives TLS to the pickers; nothing else has TLS. `change` may modify Envoy's
    configuration. `allowed` gets the addresses of the gateways and returns another such function.
    `settings` apply to both gateways.
    """
    settings = {"hash_secret": SECRET, "picker_port": 0, **settings}
    async with AsyncExitStack() as stack:
        served = [Served(), Served()]
        with using_certificates(certificates):
            mesh = await stack.enter_async_context(
                gateway_mesh(folder, num_prefills=2, num_decodes=2, access=access, **settings)
            )
            second = await _second(mesh, folder, served[1], access, settings)
        mesh.gateway.observer._publisher = served[0]
        stack.push_async_callback(second.stop)
        master = PlacingMaster(mesh)
        mesh.register(leader_at(await stack.enter_async_context(serving(master))))
        gateways = [mesh.gateway, second]
        for number, gateway in enumerate(gateways):
            mesh.register(gateway_record(gateway, number))
        port = PortReservation("127.0.0.1", 0)
        addresses = [f"127.0.0.1:{g.http.port}" for g in gateways]
        pickers = [f"127.0.0.1:{g.picker.port}" for g in gateways if g.picker is not None]
        config = picker_config(port.port, addresses, pickers)
        change(config)
        if allowed is not None:
            allowed(addresses)(config)
        envoy = await stack.enter_async_context(Envoy(folder, config, port))

        async def knows_pickers() -> bool:
            return await envoy.counter("cluster.picker.membership_healthy") == len(pickers)

        await until(knows_pickers)
        client = await stack.enter_async_context(
            httpx.AsyncClient(base_url=envoy.url, timeout=60, trust_env=False)
        )
        yield PickedSite(mesh, master, gateways, served, envoy, client)


async def _second(
    mesh: GatewayMesh,
    folder: Path,
    served: Served,
    access: AccessControl | None,
    settings: dict[str, Any],
) -> Gateway:
    values = {
        "http_port": 0, "grpc_port": 0, "drain_s": 1.0, "plan_timeout_s": 10.0, "answer_s": 60.0,
        "instance_id": "gateway-1", **settings,
    }  # fmt: skip
    own = Settings(**values)
    tokenizers = TokenizerPool(own.tokenizer_rules)
    await tokenizers.load_own(folder / "tiny")
    gateway = Gateway(own, MeshView(MemoryView(mesh.store)), tokenizers, served, list, access)
    await gateway.start()
    return gateway

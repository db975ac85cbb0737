"""The gateway: where clients call the mesh, over HTTP (OpenAI) and gRPC."""

from __future__ import annotations

import asyncio
import os

import structlog

import pdmesh
from pdmesh.net.addresses import join
from pdmesh.net.events import EventPublisher
from pdmesh.net.heartbeat import Presence
from pdmesh.net.nats.board import adapter_board, fault_board, out_of_service_board
from pdmesh.net.nats.bus import NatsBus
from pdmesh.net.nats.desired_store import desired_store
from pdmesh.net.nats.registry import NatsRegistry
from pdmesh.net.tasks import end
from pdmesh.service_process import App, StartupError, run
from pdmesh.services.gateway.access.access_control import access_control
from pdmesh.services.gateway.access.client_tokens import client_tokens
from pdmesh.services.gateway.access.tenant_ledgers import tenant_bucket
from pdmesh.services.gateway.gateway import Gateway
from pdmesh.services.gateway.readiness import PathProof
from pdmesh.services.gateway.routing.adapter_names import AdapterNames
from pdmesh.services.gateway.routing.canary_shares import CanaryShares
from pdmesh.services.gateway.routing.desired_slos import DesiredSlos
from pdmesh.services.gateway.routing.fleet import MeshView, gateway_name
from pdmesh.services.gateway.routing.out_of_service import OutOfServiceView
from pdmesh.services.gateway.settings import Settings
from pdmesh.services.gateway.text.tokenizer import BadModelDir
from pdmesh.services.gateway.text.tokenizer_pool import TokenizerPool
from pdmesh.v1.common_pb2 import InstanceRecord

log = structlog.get_logger(__name__)


async def serve(settings: Settings, app: App) -> None:
    access = access_control(
        settings.host,
        settings.keys_file,
        client_tokens(settings),
        allow_anonymous=settings.allow_anonymous,
    )
    tokenizers = await _tokenizers(settings)
    bus = await app.unless_stopping(
        NatsBus.connect(settings.nats_url, settings.instance_id, settings.num_nats_replicas)
    )
    access.join(tenant_bucket(bus), gateway_name(settings.instance_id, app.incarnation))
    registry = NatsRegistry(bus, settings.lease_s)
    view = await app.unless_stopping(registry.watch())
    publisher = EventPublisher(bus, settings.instance_id, app.incarnation)
    out_of_service = OutOfServiceView()
    out_of_service.watch(out_of_service_board(bus), fault_board(bus))
    canaries = CanaryShares()
    canaries.watch(desired_store(bus))
    adapters = AdapterNames()
    adapters.watch(adapter_board(bus))
    mesh = MeshView(view, out_of_service, canaries, adapters)
    gateway = Gateway(settings, mesh, tokenizers, publisher, app.not_ready, access)
    slos = DesiredSlos(gateway.slos)
    slos.watch(desired_store(bus))
    presence = Presence(
        registry,
        publisher,
        lease_s=settings.lease_s,
        is_ready=lambda: not app.not_ready(),
        on_replaced=app.stopping.set,
    )
    proof = PathProof(gateway.fleet.paths, settings.instance_id)
    app.add_readiness("instances", gateway.fleet.can_serve)
    app.add_readiness("path", lambda: proof.is_given or not gateway.fleet.serves_answers())
    app.add_readiness(
        "parsers", lambda: gateway.parser_start.is_settled or not gateway.fleet.serves_answers()
    )
    await gateway.start()
    picker_port = None if gateway.picker is None else gateway.picker.port
    log.info(
        "gateway.serving",
        http_port=gateway.http.port,
        grpc_port=gateway.grpc.port,
        picker_port=picker_port,
    )
    registering = asyncio.create_task(presence.start(lambda: _record(settings, app, gateway)))
    proving = asyncio.create_task(proof.run(), name="path-proof")
    try:
        await app.until_stopping(registering, proving, *gateway.loops)
    finally:
        await end([registering, proving])
        await presence.stop()
        await gateway.stop()
        await out_of_service.close()
        await canaries.close()
        await adapters.close()
        await slos.close()
        await view.close()
        await bus.close()


async def _tokenizers(settings: Settings) -> TokenizerPool:
    pool = TokenizerPool(settings.tokenizer_rules)
    try:
        await pool.load_own(settings.model_dir)
    except BadModelDir as exc:
        raise StartupError(f"{exc.message}; set PDMESH_GATEWAY_MODEL_DIR") from exc
    return pool


def _record(settings: Settings, app: App, gateway: Gateway) -> InstanceRecord:
    host = settings.advertise_host or settings.host
    return InstanceRecord(
        instance_id=settings.instance_id,
        incarnation=app.incarnation,
        service="gateway",
        region=settings.region,
        grpc_address=join(host, gateway.grpc.port),
        http_address=join(host, gateway.http.port),
        ops_address=app.ops_address,
        is_draining=gateway.frontend.is_draining,
        version=pdmesh.__version__,
        pid=os.getpid(),
    )


def main() -> None:
    run("gateway", Settings, serve)


if __name__ == "__main__":
    main()

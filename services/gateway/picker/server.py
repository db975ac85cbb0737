"""The picker's gRPC server: Envoy's ExternalProcessor, and grpc.health.v1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from grpc_health.v1 import health_pb2

from pdmesh.net.addresses import join
from pdmesh.net.grpc import rpc
from pdmesh.net.grpc.slow_senders import READ_AHEAD
from pdmesh.service_process import StartupError
from pdmesh.services.gateway.grpc.health import HealthServicer
from pdmesh.services.gateway.picker.servicer import SERVICE, PickerServicer
from pdmesh.telemetry import metrics, names

_HEALTH_SERVICE: Final = health_pb2.DESCRIPTOR.services_by_name["Health"]
# Names of the Endpoint Picker Protocol.
_READINESS, _LIVENESS = "readiness", "liveness"
_MAX_STREAMS: Final = 4096  # at once on one connection, as a proxy has few connections
_MAX_METADATA_BYTES: Final = 16_384
_MAX_FIELDS: Final = 8_192  # of a message, most of them headers
_HEAD_BYTES: Final = 128 << 10  # the most bytes of a message without its body


@dataclass(frozen=True, slots=True)
class PickerAddress:
    """Where the picker listens, and its bounds.

    With `is_certified`, callers must show a certificate if the picker has one.
    """

    host: str
    port: int
    max_connections: int
    max_body_bytes: int
    is_certified: bool
    reuse_port: bool = False


class PickerServer:
    def __init__(self, servicer: PickerServicer, at: PickerAddress) -> None:
        self._server = rpc.server(
            at.max_body_bytes + _HEAD_BYTES,
            is_public=True,  # proxies have no mesh token
            max_connections=at.max_connections,
            reuse_port=at.reuse_port,
            options=(
                *READ_AHEAD,
                ("grpc.max_concurrent_streams", _MAX_STREAMS),
                ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
                ("grpc.absolute_max_metadata_size", _MAX_METADATA_BYTES),
            ),
        )
        self.servicer = servicer
        rpc.add_service(self._server, SERVICE, servicer, _MAX_FIELDS)
        self._health = HealthServicer((SERVICE.full_name, _READINESS), living=(_LIVENESS,))
        rpc.add_service(self._server, _HEALTH_SERVICE, self._health, _MAX_FIELDS)
        try:
            address = join(at.host, at.port)
            self.port = rpc.listen(self._server, address, certified=at.is_certified)
        except RuntimeError as exc:
            message = f"cannot listen on {at.host}:{at.port}; set PDMESH_GATEWAY_PICKER_PORT"
            raise StartupError(message) from exc
        metrics.gauge(
            names.PICKER_STREAMS,
            "Open streams of proxies at the endpoint picker",
            lambda: servicer.num_streams,
        )

    async def start(self) -> None:
        await self._server.start()
        self._health.set_serving(True)

    async def stop(self, grace_s: float) -> None:
        """Report NOT_SERVING to the proxies, and then give open streams `grace_s` to end."""
        self._health.close()
        await self._server.stop(grace_s)

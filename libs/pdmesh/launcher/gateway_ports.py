"""Reserves the ports of a mesh's gateways before any process starts."""

from __future__ import annotations

import contextlib
from typing import Final

from pdmesh.embedded.ports import PortReservation, PortTaken
from pdmesh.launcher.spec import MeshSpec, Ports

_PORTS_APART: Final = 10
_MAX_PORT: Final = 65_535


def reserve_ports(spec: MeshSpec, cleanup: contextlib.AsyncExitStack) -> dict[str, Ports]:
    """Reserve an HTTP and a gRPC port for each region, until `cleanup`.

    Each region's ports are `_PORTS_APART` above those of the region before. Raises PortTaken.
    """
    taken: set[int] = set()
    return {
        region: Ports(
            _reserve(spec.host, spec.http_port, number, "--http-port", taken, cleanup),
            _reserve(spec.host, spec.grpc_port, number, "--grpc-port", taken, cleanup),
        )
        for number, region in enumerate(spec.regions or ("",))
    }


def _reserve(
    host: str,
    first: int,
    number: int,
    option: str,
    taken: set[int],
    cleanup: contextlib.AsyncExitStack,
) -> int:
    port = first + number * _PORTS_APART if first else 0
    if port > _MAX_PORT:
        raise PortTaken(
            f"region {number + 1} would need port {port}, which does not exist; choose a lower "
            f"{option}"
        )
    if port and port in taken:  # both gateways could listen, and each would get half of the calls
        raise PortTaken(f"port {port} is used twice; choose another with {option}")
    taken.add(port)
    reservation = PortReservation(host, port, option)
    cleanup.callback(reservation.close)
    return reservation.port

"""Sends frames that no gRPC library would send to the gRPC ports of the mesh.

The tests attack real processes, measure their memory, and check that each process still serves
afterwards. gRPC answers as many pings and settings as a client sends, but the memory that it uses
for them must be bounded.
"""

from __future__ import annotations

import asyncio
import struct

import pytest

from pdmesh.launcher import probe
from pdmesh.launcher.mesh import Mesh
from pdmesh.net.grpc import rpc
from pdmesh.v1 import inference_service_pb2 as pb
from pdmesh.v1.inference_service_pb2_grpc import InferenceServiceStub
from tests.support.attack.abuse import (
    ATTACKER,
    INCOMING,
    MIB,
    MemoryWatch,
    attack,
    flood,
    grpc_ports,
    served_meanwhile,
)
from tests.support.attack.raw_http2 import (
    CONTINUATION,
    DATA,
    HEADERS,
    HELLO,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    Halves,
    call,
    frame,
    header,
    window_update,
)

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(600)]

OFFERED = 4 * MIB
METHOD = b"/pdmesh.v1.InferenceService/Generate"
HEALTH = b"/grpc.health.v1.Health/Check"
REFLECTION = b"/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
FLOODS: dict[str, tuple[bytes, bytes]] = {
    "a preface": (b"", b"PRI"),
    "pings": (HELLO, frame(PING, b"12345678") * 500),
    "settings": (HELLO, frame(SETTINGS, struct.pack(">HI", 4, 65535)) * 500),
    "window updates": (HELLO, window_update(0, 1) * 500),
    "frames of no kind": (HELLO, frame(0x77, b"x" * 16000)),
    "data of no call": (HELLO, frame(DATA, b"x" * 16000, stream=9)),
    "metadata without end": (
        HELLO + call(1, METHOD, flags=0),
        frame(CONTINUATION, header(b"a", b"b" * 8000), stream=1),
    ),
    "empty continuations": (HELLO + call(1, METHOD, flags=0), frame(CONTINUATION, stream=1) * 500),
    "calls taken back": (
        HELLO,
        b"".join(call(s, METHOD) + frame(RST_STREAM, b"\0\0\0\x08", stream=s) for s in range(1,
            1001, 2)),
    ),
    "calls without end": (HELLO, b"".join(call(s, METHOD) for s in range(1, 1001, 2))),
    "a call that does not exist": (HELLO + call(1, b"/a.B/" + b"c" * 8000),
        frame(DATA, b"x" * 16000, stream=1)),
    "nonsense": (HELLO, frame(HEADERS, b"\xff" * 1000, flags=4, stream=1)),
}  # fmt: skip


@pytest.mark.fault("F30")
@pytest.mark.parametrize("case", FLOODS)
async def test_a_flood_of_frames_is_not_kept(mesh: Mesh, case: str) -> None:
    first, unit = FLOODS[case]
    ports = grpc_ports(mesh)
    assert {"gateway-0", "prefill-0", "decode-0", "master-scheduler"} <= set(ports)
    async with served_meanwhile(mesh), MemoryWatch(mesh, ports) as memory:
        await asyncio.gather(
            *(
                flood(port, first, unit, OFFERED, is_deaf=is_deaf, patience_s=5.0)
                for port in ports.values()
                for is_deaf in (False, True)
            )
        )
    print(f"{case}: { ({p: f'{n / MIB:.1f} MiB' for p, n in memory.grown.items()}) }")
    assert max(memory.grown.values()) < 32 * MIB, memory.grown
    for process in ports:
        assert await probe.is_live(mesh.ops_address(process)), process


@pytest.mark.fault("F29", "F30")
async def test_a_connection_that_never_says_hello_is_cut(mesh: Mesh) -> None:
    ports = grpc_ports(mesh)
    async with served_meanwhile(mesh):
        await asyncio.gather(
            *(
                attack(mesh, sent, port=p)
                for p in ports.values()
                for sent in (b"", PREFACE[:9], PREFACE)
            )
        )  # the test fails if an attack does not end


@pytest.mark.fault("F30", "F31")
@pytest.mark.parametrize("method", [METHOD, HEALTH, REFLECTION])
async def test_messages_without_their_end_are_bounded_together_and_given_up(
    mesh: Mesh, method: bytes
) -> None:
    """Each attacker makes forty calls on one connection, and sends 7 MiB of each call but never its
    end. Once, such calls took 280 MiB as long as the connection stayed.
    """
    halves = [Halves(method, 40, 7 * MIB) for _ in range(3)]
    port = grpc_ports(mesh)["gateway-0"]
    async with served_meanwhile(mesh), MemoryWatch(mesh, ["gateway-0"]) as memory:
        async with asyncio.timeout(100):
            await asyncio.gather(*(each.run(port, ATTACKER) for each in halves))
        async with rpc.channel(mesh.grpc_address) as channel:
            request = pb.GenerateRequest(text="abc", params=pb.GenerationParams(max_tokens=2))
            assert (await InferenceServiceStub(channel).Generate(request)).text is not None
    sent = [each.num_sent // MIB for each in halves]
    print(f"{sent} MiB taken, {memory.grown['gateway-0'] / MIB:.0f} MiB more resident at most")
    assert all(each.is_ended or len(each.ended) == 40 for each in halves)
    assert memory.grown["gateway-0"] < INCOMING + 48 * MIB

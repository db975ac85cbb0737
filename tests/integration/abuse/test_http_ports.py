"""Sends endless or slow bytes at every place of a request, on every HTTP port of the mesh.

The tests attack real processes, on ports for clients and for operators. They measure the bytes that
the server accepts, its memory, and its CPU time relative to honest requests. They check that the
server ends the connection.
"""

from __future__ import annotations

import asyncio

import pytest

from pdmesh.launcher import probe
from pdmesh.launcher.mesh import Mesh
from tests.support.attack.abuse import (
    HEAD,
    MIB,
    ROUNDS,
    MemoryWatch,
    attack,
    cpu_s,
    flood,
    http_ports,
    served_meanwhile,
)
from tests.support.waiting import until

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(600)]

CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
GET = b"GET /health/live HTTP/1.1\r\nhost: x\r\n"
OFFERED = 32 * MIB  # what each connection tries to send
TAKEN = 8 * MIB  # What the kernel's buffers of both ends may take. Both are on this machine.
CONNECTIONS = 3
FLOODS: dict[str, tuple[bytes, bytes]] = {
    "empty lines before the head": (b"", b"\r\n"),
    "a method": (b"", b"A"),
    "a path": (b"GET /", b"a"),
    "a header's name": (GET, b"a"),
    "a header's value": (GET + b"a: ", b"a"),
    "space before a value": (GET + b"a:", b" "),
    "headers": (GET, b"a: b\r\n"),
    "a chunk's size": (CHUNKED, b"0"),
    "a chunk's extension": (CHUNKED + b"1;", b"a"),
    "tiny chunks": (CHUNKED, b"1\r\nx\r\n"),
    "a trailer's name": (CHUNKED + b"0\r\n", b"a"),
    "a trailer's value": (CHUNKED + b"1\r\nx\r\n0\r\na: ", b"a"),
    "trailers": (CHUNKED + b"0\r\n", b"a: b\r\n"),
    "a body nobody asked for": (
        b"POST /nowhere HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n", b"a"),
    "a body for the wrong method": (
        b"GET /health/live HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n", b"a"),
    "a body": (HEAD + b"content-length: 99999999999\r\n\r\n", b"a"),
    "empty lines after a request": (GET + b"\r\n", b"\r\n"),
    "requests": (b"", GET + b"\r\n"),
}  # fmt: skip


@pytest.mark.fault("F29", "F31")
@pytest.mark.parametrize("case", FLOODS)
async def test_endless_input_is_cut_on_every_port(mesh: Mesh, case: str) -> None:
    first, unit = FLOODS[case]
    ports = http_ports(mesh)
    processes = {process for process, _ in ports.values()}
    # A client that reads its answers may send any number of requests.
    is_endless = case != "requests"
    async with served_meanwhile(mesh), MemoryWatch(mesh, processes) as memory:
        for name, (_, port) in ports.items():
            floods = (flood(port, first, unit, OFFERED) for _ in range(CONNECTIONS))
            for flooded in await asyncio.gather(*floods):
                if is_endless:
                    assert flooded.is_ended, (name, flooded.num_sent)
                    assert flooded.num_sent < TAKEN, name
                    assert flooded.status in {0, 200, 400, 404, 405, 408, 413, 431}, name
    print(f"{case}: { ({p: f'{n / MIB:.1f} MiB' for p, n in memory.grown.items()}) }")
    assert max(memory.grown.values()) < 16 * MIB, memory.grown


@pytest.mark.fault("F29")
async def test_a_flood_costs_no_more_cpu_than_ten_honest_requests_for_each_connection(
    mesh: Mesh,
) -> None:
    """Compares a flood with honest requests that have the longest allowed head.

    The test subtracts the CPU time that an idle process uses.
    """
    honest = GET + b"connection: close\r\n" + b"a: b\r\n" * 2000 + b"\r\n"

    async def spent(process: str, port: int, num: int, first: bytes, unit: bytes) -> float:
        began, clock = cpu_s(mesh, process), asyncio.get_running_loop().time()
        for _ in range(num):
            if unit:
                await flood(port, first, unit, OFFERED)
            else:
                await attack(mesh, first, port=port)
        took_s = asyncio.get_running_loop().time() - clock
        used_s = cpu_s(mesh, process) - began
        idle, clock = cpu_s(mesh, process), asyncio.get_running_loop().time()
        await asyncio.sleep(0.3)
        idle_share = (cpu_s(mesh, process) - idle) / (asyncio.get_running_loop().time() - clock)
        return max(0.0, used_s - idle_share * took_s) / num

    for name, (process, port) in http_ports(mesh).items():
        honest_s, flooded_s = [], []
        for _ in range(ROUNDS):
            honest_s.append(await spent(process, port, 10, honest, b""))
            flooded_s.append(await spent(process, port, 1, *FLOODS["trailers"]))
            if min(flooded_s) <= 10 * max(honest_s):
                break
        print(f"{name}: {min(flooded_s) * 1e3:.2f} ms, an honest one {max(honest_s) * 1e3:.2f}")
        assert min(flooded_s) <= 10 * max(honest_s), name


TRICKLES: dict[str, tuple[bytes, bytes]] = {
    "nothing": (b"", b""),
    "empty lines": (b"", b"\r\n" * 500),
    "a head": (GET + b"a: ", b"a" * 1000),
    "a chunk's extension": (CHUNKED + b"1;", b"a" * 1000),
    "trailers": (CHUNKED + b"0\r\n", b"a: b\r\n" * 150),
}


@pytest.mark.fault("F29")
async def test_a_slow_request_is_cut_on_every_port(mesh: Mesh) -> None:
    async def check(name: str, port: int, case: str) -> None:
        first, then = TRICKLES[case]
        ended = await attack(mesh, first, then, port=port)
        # A server that expects no body answers before it has read the body.
        assert ended.status in (
            {408} if case in {"nothing", "empty lines", "a head"} else {408, 404, 405}
        ), (name, case)

    async with served_meanwhile(mesh):
        await asyncio.gather(
            *(check(n, port, c) for n, (_, port) in http_ports(mesh).items() for c in TRICKLES)
        )


@pytest.mark.fault("F31")
async def test_every_port_refuses_heads_that_violate_the_rfc(mesh: Mesh) -> None:
    close = b"connection: close\r\n\r\n"
    path = {"public": b"/v1%2fmodels"}
    for name, (_, port) in http_ports(mesh).items():
        encoded = path.get(name, b"/health%2flive")
        for sent, status in (
            (b"GET /health/live HTTP/1.1\r\nhost: a\r\n" + close, 200),
            (b"GET /health/live HTTP/1.1\r\n" + close, 400),
            (b"GET /health/live HTTP/1.1\r\nhost: a\r\nhost: b\r\n" + close, 400),
            (b"GET /health/live HTTP/2.0\r\nhost: a\r\n" + close, 505),
            (b"GET " + encoded + b" HTTP/1.1\r\nhost: a\r\n" + close, 404),
            (b"DELETE /health/live HTTP/1.1\r\nhost: a\r\n" + close, 405),
            (HEAD + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        ):
            ended = await attack(mesh, sent, port=port)
            assert ended.status == status, (name, sent)
            assert (b"\r\nallow: " in ended.answer) == (status == 405), name


@pytest.mark.fault("F29")
async def test_a_flood_on_the_ops_port_does_not_silence_the_process(mesh: Mesh) -> None:
    """Once, three hundred half-sent heads stayed forever.

    A supervisor kills a process that does not answer it, so even a full port must let the
    supervisor in.
    """
    ops = {n: p for n, (_, p) in http_ports(mesh).items() if n != "public"}
    for name, port in ops.items():
        held = [asyncio.create_task(attack(mesh, GET, port=port)) for _ in range(300)]
        while not all(task.done() for task in held):
            # The port may drop a probe in a burst of new connections. The supervisor asks again,
            # and this test does the same.
            await until(lambda port=port: probe.is_live(f"127.0.0.1:{port}"))
            await asyncio.sleep(0.05)
        assert {task.result().status for task in held} <= {0, 408}, name

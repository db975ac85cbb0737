"""Leak test: after many requests with random disconnects and killed instances, nothing may be left
(I4).

    python -m loadtests.faults.leak --requests 100000 --out loadtests/results/leak-DATE

The mesh consists of real processes: two gateways (one hands KV on whole, one per layer), two
prefills and two decodes on the sim engine. Its host pools and file store are too small for the
prompts. Some of the clients leave at random moments by FIN or RST. prefill-1 and decode-1 are
killed again and again, while prefill-0 and decode-0 run from beginning to end. A leak would add up
in these two, in the gateways, or outside of the processes: in shared memory, keys in Redis, or
consumers at NATS.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import socket
import struct
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from loadtests.faults.leftovers import (
    lasting_keys,
    num_consumers,
    shared_memory,
    still_there,
)
from loadtests.gateway.report import table
from loadtests.harness.client import http_request
from loadtests.harness.results import write
from pdmesh.launcher.mesh import Mesh
from pdmesh.launcher.spec import MeshSpec

T = TypeVar("T")

_RST: Final = struct.pack("ii", 1, 0)
_LOOK_S: Final = 0.02  # how often to check the number of requests so far
_GIVE_UP_SHARE: Final = 0.4
_CLIENT_TIMEOUT_S: Final = 60.0
# Longer than a ticket lease (10 s), a registry lease (3 s), and the time to detect a killed peer.
_QUIESCE_S: Final = 20.0
_SURVIVORS: Final = ("prefill-0", "decode-0", "gateway-0", "gateway-1")
_PROCESSES: Final = (*_SURVIVORS, "prefill-1", "decode-1")
_INSTANCES: Final = ("prefill-0", "decode-0", "prefill-1", "decode-1")
_TIERS: Final = {
    "PDMESH_KV_HOST_POOL_BYTES": str(8 << 20),  # 1,000 blocks; the prompts fill 2,000
    "PDMESH_KV_FILE_STORE_BYTES": str(12 << 20),
}
_FILE_SLACK: Final = 8  # how many more files may be open, for connections to replaced processes
_RESERVED: Final = "pdmesh_kv_blocks_free"  # a gauge: blocks that are not reserved for a request
_HELD: Final = "pdmesh_kv_engine_blocks_free"  # a gauge: blocks that no request holds
# Gauges that are zero while a process holds nothing for any request.
_ZERO: Final = (
    "pdmesh_slots_used",
    "pdmesh_kv_tickets",
    "pdmesh_kv_staging_used",
    "pdmesh_kv_landing_used",
    "pdmesh_kv_retrievals",
    "pdmesh_kv_pulls_queued",
    "pdmesh_kv_tier_leased_blocks",
    "pdmesh_gateway_waiting",
    "pdmesh_requests_in_flight",
    "pdmesh_gateway_legs",
)


@dataclass(slots=True)
class Report:
    num_requests: int = 0
    num_given_up: int = 0
    num_kills: int = 0
    duration_s: float = 0.0
    outcomes: dict[str, int] = field(default_factory=dict)
    seconds_until_idle: float = 0.0
    # what processes still hold for requests
    held: dict[str, dict[str, float]] = field(default_factory=dict)
    # blocks that are not reserved for a request, before and after
    blocks: dict[str, tuple[float, float]] = field(default_factory=dict)
    # blocks of the engine that no request holds, before and after
    engine_blocks: dict[str, tuple[float, float]] = field(default_factory=dict)
    files: dict[str, tuple[int, int]] = field(default_factory=dict)
    rss_mib: dict[str, tuple[float, float]] = field(default_factory=dict)
    outside: dict[str, tuple[int, int]] = field(default_factory=dict)  # see `_outside`
    # blocks that the surviving prefill's tiers moved
    tiers: dict[str, int] = field(default_factory=dict)

    @property
    def leaks(self) -> list[str]:
        found = [f"{name} holds {rest}" for name, rest in self.held.items()]
        for blocks in (self.blocks, self.engine_blocks):
            found += [f"{n}: {a} of {b} blocks free" for n, (b, a) in blocks.items() if a != b]
        found += [f"{b} {what} before, {a} after" for what, (b, a) in self.outside.items() if a > b]
        return found + [
            f"{name}: {after} files, {before} before"
            for name, (before, after) in self.files.items()
            if after > before + _FILE_SLACK
        ]


@contextlib.asynccontextmanager
async def leak_mesh(directory: Path) -> AsyncIterator[Mesh]:
    spec = MeshSpec(
        engine="sim",
        num_prefill=2,
        num_decode=2,
        num_gateways=2,
        http_port=0,
        grpc_port=0,
        start_timeout_s=120,
        env={
            "PDMESH_SIM_LAW": "zero",
            "PDMESH_PREFILL_NUM_SLOTS": "32",
            "PDMESH_DECODE_NUM_SLOTS": "32",
            "PDMESH_LOG_LEVEL": "warning",
            "PDMESH_PREFILL_NUM_KV_BLOCKS": "640",  # a third of the blocks that the prompts fill
            "PDMESH_KV_FILE_STORE_DIR": str(directory / "blocks"),
            **_TIERS,
        },
        service_env={"gateway-1": {"PDMESH_KV_TRANSFER": "per_layer"}},
    )
    async with Mesh(spec, directory) as mesh:
        yield mesh


def bodies(rng: random.Random, count: int = 1000) -> list[bytes]:
    """Requests whose prompts have one token to many blocks. A third of them repeat the beginning of
    another prompt.
    """
    shared = [rng.randrange(40, 120) for _ in range(700)]
    made: list[bytes] = []
    for _ in range(count):
        length = rng.choice((1, 63, 64, 65, rng.randrange(1, 300), rng.randrange(300, 1000)))
        prompt = [rng.randrange(40, 120) for _ in range(length)]
        if rng.random() < 1 / 3:
            prompt[: length // 2] = shared[: length // 2]
        body = {
            "model": "default",
            "prompt": prompt,
            "max_tokens": rng.choice((1, 2, 5, rng.randrange(1, 40))),
            "stream": True,
        }
        made.append(json.dumps(body).encode())
    return made


class Clients:
    """Clients of the mesh. `run` sends `count` requests, at most `concurrency` at a time.

    Each request has a new connection, or a connection that was kept open.
    """

    def __init__(self, url: str, report: Report, seed: int) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self._host, self._port = parts.hostname, parts.port
        self._rng = random.Random(seed)
        self._requests = [
            http_request(self._host, self._port, "/v1/completions", body)
            for body in bodies(self._rng)
        ]
        self._report = report
        self._left = 0

    async def run(self, count: int, concurrency: int) -> None:
        self._left = count
        await asyncio.gather(*(self._client() for _ in range(concurrency)))

    async def _client(self) -> None:
        connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        while self._left > 0:
            self._left -= 1
            self._report.num_requests += 1
            try:
                if connection is None:
                    connection = await asyncio.open_connection(self._host, self._port)
                async with asyncio.timeout(_CLIENT_TIMEOUT_S):
                    outcome = await self._request(*connection)
            except (OSError, asyncio.IncompleteReadError):
                outcome = "cut"
            except TimeoutError:
                outcome = "hung"
            outcomes = self._report.outcomes
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
            if outcome not in {"done", "error"}:
                if connection is not None:
                    await _close(connection[1])
                connection = None
            if outcome == "cut":
                await asyncio.sleep(0.02)
        if connection is not None:
            await _close(connection[1])

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        writer.write(self._rng.choice(self._requests))
        if self._rng.random() < _GIVE_UP_SHARE:
            return await self._give_up(reader, writer)
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            writer.close()
            return "refused"
        body = await reader.readuntil(b"\r\n0\r\n\r\n")
        return "done" if b"[DONE]" in body else "error"

    async def _give_up(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        """Disconnect after a random time, or after some bytes of the answer, by FIN or RST."""
        self._report.num_given_up += 1
        if self._rng.random() < 0.5:
            await asyncio.sleep(self._rng.expovariate(1 / 0.01))
        else:
            await reader.read(self._rng.randrange(1, 2000))
        if self._rng.random() < 0.5:
            sock: socket.socket = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RST)
        writer.close()
        return "given up"


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def _kill_often(mesh: Mesh, every: int, report: Report, mapped: set[str]) -> None:
    """Kill two instances in turns, each time after `every` further requests.

    Before each kill, the shared memory that the instance maps is added to `mapped`.
    """
    for name in _alternate("prefill-1", "decode-1"):
        kill_at = report.num_requests + every
        while report.num_requests < kill_at:
            await asyncio.sleep(_LOOK_S)
        with contextlib.suppress(KeyError):
            mapped |= shared_memory(mesh.pid(name))
            mesh.kill(name, signal.SIGKILL)
            report.num_kills += 1
        await mesh.wait_ready([name], timeout_s=60)


def _alternate(*names: str) -> Any:
    while True:
        yield from names


def gauges(mesh: Mesh, process: str) -> dict[str, float]:
    """The values at /metrics, summed over the labels of each metric."""
    url = f"http://{mesh.ops_address(process)}/metrics"
    found: dict[str, float] = {}
    with urllib.request.urlopen(url, timeout=5) as response:
        for line in response.read().decode().splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                key = name.partition("{")[0]
                found[key] = found.get(key, 0.0) + float(value)
    return found


def _is_zero_at_rest(metric: str) -> bool:
    """Whether the metric is one of `_ZERO`. The exporter may have added a unit to its name.

    Other metrics may begin with such a name, for example counters. They do not match.
    """
    return any(metric == zero or metric.startswith(f"{zero}_bytes") for zero in _ZERO) or (
        metric.removesuffix("_ratio") in _ZERO
    )


def held(mesh: Mesh, processes: Sequence[str] = _PROCESSES) -> dict[str, dict[str, float]]:
    """What these processes still hold for requests. The result is empty if they hold nothing."""
    rest: dict[str, dict[str, float]] = {}
    for process in processes:
        left = {n: v for n, v in gauges(mesh, process).items() if _is_zero_at_rest(n) and v}
        if left:
            rest[process] = left
    return rest


async def _outside(mesh: Mesh, mapped: Iterable[str]) -> dict[str, int]:
    """The mesh's resources outside of its processes.

    `mapped` is the shared memory that killed processes mapped.
    """
    of_living = {name: shared_memory(mesh.pid(name)) for name in _PROCESSES}
    kept = still_there(set(mapped).difference(*of_living.values()))
    return {
        "segments of shared memory that survivors map": sum(len(of_living[n]) for n in _SURVIVORS),
        "segments that killed processes left": len(kept),
        "NATS consumers": await num_consumers(mesh.nats_url),
        "lasting Redis keys": await lasting_keys(mesh.redis_url, _INSTANCES),
    }


def _moved_by_tiers(mesh: Mesh) -> dict[str, int]:
    """The blocks that prefill-0's tiers moved, by tier and event."""
    url = f"http://{mesh.ops_address('prefill-0')}/metrics"
    moved: dict[str, int] = {}
    with urllib.request.urlopen(url, timeout=5) as response:
        for line in response.read().decode().splitlines():
            if line.startswith("pdmesh_kv_tier_blocks_total{"):
                labels = dict(re.findall(r'(\w+)="(\w+)"', line))
                moved[f"{labels['tier']} {labels['event']}"] = int(float(line.rsplit(" ", 1)[1]))
    return moved


def _free_blocks(mesh: Mesh, metric: str) -> dict[str, float]:
    return {
        name: sum(v for n, v in gauges(mesh, name).items() if n.startswith(metric))
        for name in ("prefill-0", "decode-0")
    }


def _of_processes(mesh: Mesh) -> tuple[dict[str, int], dict[str, float]]:
    files = {name: len(list(Path(f"/proc/{mesh.pid(name)}/fd").iterdir())) for name in _SURVIVORS}
    pages = {
        name: int(Path(f"/proc/{mesh.pid(name)}/statm").read_text().split()[1])
        for name in _SURVIVORS
    }
    return (
        files,
        {n: round(p * os.sysconf("SC_PAGE_SIZE") / 2**20, 1) for n, p in pages.items()},
    )


async def leak_test(
    mesh: Mesh, *, count: int, concurrency: int, kill_every: int, seed: int
) -> Report:
    report = Report()
    warm = Report()
    await Clients(mesh.http_url, warm, seed + 1).run(min(count // 2, 1000), concurrency)
    await _until_nothing_held(mesh)
    mapped: set[str] = set()
    outside, (files, rss) = await _outside(mesh, ()), _of_processes(mesh)
    blocks, engine_blocks = _free_blocks(mesh, _RESERVED), _free_blocks(mesh, _HELD)
    started = time.monotonic()
    killer = asyncio.create_task(_kill_often(mesh, kill_every, report, mapped))
    try:
        await Clients(mesh.http_url, report, seed).run(count, concurrency)
    finally:
        killer.cancel()
        await asyncio.wait([killer])
    report.duration_s = round(time.monotonic() - started, 1)
    await mesh.wait_ready(timeout_s=60)
    report.seconds_until_idle = round(await _until_nothing_held(mesh), 2)
    report.held = held(mesh)
    report.outside = _beside(outside, await _until_as_before(mesh, mapped, outside))
    report.blocks = _beside(blocks, _free_blocks(mesh, _RESERVED))
    report.engine_blocks = _beside(engine_blocks, _free_blocks(mesh, _HELD))
    files_now, rss_now = _of_processes(mesh)
    report.files, report.rss_mib = _beside(files, files_now), _beside(rss, rss_now)
    report.tiers = _moved_by_tiers(mesh)
    return report


def _beside(before: Mapping[str, T], after: Mapping[str, T]) -> dict[str, tuple[T, T]]:
    return {name: (value, after[name]) for name, value in before.items()}


async def _until_as_before(
    mesh: Mesh, mapped: set[str], before: Mapping[str, int]
) -> dict[str, int]:
    """Wait until the mesh has no more resources outside of its processes than before the run.

    Waits for at most `_QUIESCE_S`, and returns the resources that the mesh has then. NATS drops the
    consumer of a killed process after 5 s.
    """
    end = time.monotonic() + _QUIESCE_S
    while True:
        now = await _outside(mesh, mapped)
        if all(now[what] <= count for what, count in before.items()) or time.monotonic() > end:
            return now
        await asyncio.sleep(0.5)


async def _until_nothing_held(mesh: Mesh) -> float:
    """Wait until processes hold nothing, for at most `_QUIESCE_S`; returns the seconds it took."""
    began = time.monotonic()
    while held(mesh) and time.monotonic() < began + _QUIESCE_S:
        await asyncio.sleep(0.1)
    return time.monotonic() - began


async def _main(arguments: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="pdmesh-leak-") as directory:
        async with leak_mesh(Path(directory)) as mesh:
            report = await leak_test(
                mesh,
                count=arguments.requests,
                concurrency=arguments.concurrency,
                kill_every=arguments.kill_every,
                seed=arguments.seed,
            )
    text = as_markdown(report)
    print(text)
    if arguments.out:
        about = (
            f"{arguments.concurrency} clients of two gateways (whole model, layer by layer), two "
            f"prefills and two decodes on sim; after every {arguments.kill_every} requests "
            "prefill-1 or decode-1 is killed in turns. Host pools of 8 MiB, a file store of 12 "
            "MiB, prompts of 17 MiB. What the processes hold, and what "
            f"is outside of them, is read when nothing is under way any more (I4)."
        )
        found = {**asdict(report), "leaks": report.leaks}
        write(arguments.out, "loadtests.faults.leak", "Leak test", about, text, **found)
    return 1 if report.leaks or report.outcomes.get("hung") else 0


def as_markdown(report: Report) -> str:
    outcomes = ", ".join(f"{count:,} {name}" for name, count in report.outcomes.items())
    rows = [
        [
            name,
            "{:.0f} of {:.0f}".format(*reversed(report.blocks[name]))
            if name in report.blocks
            else "",
            "{:.0f} of {:.0f}".format(*reversed(report.engine_blocks[name]))
            if name in report.engine_blocks
            else "",
            "{} -> {}".format(*report.files[name]),
            "{:.0f} -> {:.0f}".format(*report.rss_mib[name]),
        ]
        for name in report.files
    ]
    return "\n\n".join(
        [
            (
                f"{report.num_requests:,} requests in {report.duration_s:.0f} s, "
                f"{report.num_kills} kills: {outcomes}."
            ),
            (
                f"**Leaks: {'; '.join(report.leaks) or 'none'}.** Everything was given back "
                f"{report.seconds_until_idle:.2f} s after the last answer."
            ),
            table(
                [
                    "survivor",
                    "blocks not reserved",
                    "not held",
                    "open files",
                    "resident MiB",
                ],
                rows,
            ),
            table(
                ["outside of the processes", "before", "after"],
                [[what, str(b), str(a)] for what, (b, a) in report.outside.items()],
            ),
            (
                "Blocks that prefill-0's tiers moved: "
                f"{', '.join(f'{n:,} {what}' for what, n in sorted(report.tiers.items()))}."
            ),
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--concurrency", type=int, default=48)
    parser.add_argument("--kill-every", type=int, default=5000, help="requests")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write this .md and .json")
    return asyncio.run(_main(parser.parse_args(argv)))


if __name__ == "__main__":
    raise SystemExit(main())

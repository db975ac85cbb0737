"""How old the master's knowledge is: from a change at an instance to its place in the master's view
(`make bench NAME=staleness`, S100).

    python -m loadtests.placement.staleness --instances 10,100,1000 --rate 1000 \\
        --out loadtests/results/staleness-2026-11-21

The instances only publish changes, and all run in one process. The bus is a real NATS server, and
the master's own feeds receive the changes. Every change has the time at which it was made.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

from loadtests.harness.processes import ProcessSet, cpu_between
from loadtests.harness.results import quantile, write
from loadtests.harness.server import running
from pdmesh.core.instance.prompt_times import LoadBook
from pdmesh.core.kv.prefix.prefix_index import DeltaOutcome, IndexDelta, PrefixIndex
from pdmesh.core.placement.fleet import Event, Fleet, LoadReported
from pdmesh.embedded.servers import NatsServer
from pdmesh.engine.base import BlocksChanged
from pdmesh.instance.legs.publishing import KvBlocksPublisher, LoadPublisher
from pdmesh.kv.index.feed import IndexFeed, Snapshot
from pdmesh.net.bus import Message
from pdmesh.net.events import EventPublisher
from pdmesh.net.nats.board import fault_board, health_board
from pdmesh.net.nats.bus import NatsBus
from pdmesh.net.registry import RecordChanged
from pdmesh.services.master_scheduler.placement.fleet_feed import FleetFeed, MonitorBoards
from pdmesh.v1.common_pb2 import INSTANCE_PHASE_READY, ROLE_PREFILL, InstanceRecord
from pdmesh.v1.instance_service_pb2 import Load

LOAD_BAR_MS: Final = 20.0  # P/D-Serve's periods of polling
BLOCKS_BAR_MS: Final = 50.0
_POLLED: Final = "mesh.v1.bench.polled."
_BEGIN_S: Final = 30.0  # time for a thousand publishers to connect
_LATE_S: Final = 2.0  # time for the last changes to arrive


@dataclass(frozen=True, slots=True)
class Staleness:
    """The results for one number of instances.

    Ages are in milliseconds, from a change until the master's view has it. `num_lost` changes of
    blocks never arrived. CPU is in seconds per second. Fields that end with `to_polled` divide the
    90th percentile of ages by the same with polls every 20 ms (loads) and 50 ms (blocks).
    """

    num_instances: int
    changes_per_s: float
    events_per_s: float
    load_p50_ms: float
    load_p99_ms: float
    load_max_ms: float
    blocks_p50_ms: float
    blocks_p99_ms: float
    blocks_max_ms: float
    num_lost: int
    master_cpu: float
    load_to_polled: float
    blocks_to_polled: float


# --- the instances --------------------------------------------------------------------------------


class _Instance:
    """Publishes the changes of one instance, with the time of each."""

    def __init__(self, bus: NatsBus, name: str) -> None:
        events = EventPublisher(bus, name, 1)
        self._bus, self._name = bus, name
        self._changed_at_us = 0  # time of the first change that is not published yet
        self._load_polled: list[int] = []
        self._blocks_polled: list[int] = []
        self._load = LoadPublisher(events, name, self._read, LoadBook())
        self._blocks = KvBlocksPublisher(events, name)
        self.tasks = [
            asyncio.create_task(self._load.run()),
            asyncio.create_task(self._blocks.run()),
            asyncio.create_task(self._poll("load", self._load_polled, LOAD_BAR_MS)),
            asyncio.create_task(self._poll("blocks", self._blocks_polled, BLOCKS_BAR_MS)),
        ]

    def change(self) -> None:
        """Make the changes of one prompt: a slot is taken, and a block is stored."""
        now_us = time.monotonic_ns() // 1000
        self._changed_at_us = self._changed_at_us or now_us
        self._load_polled[:] = self._load_polled or [now_us]
        self._blocks_polled.append(now_us)
        self._load.changed()
        self._blocks.add(BlocksChanged(stored=(now_us.to_bytes(8, "big") + random.randbytes(8),)))

    def _read(self) -> Load:
        changed_at_us, self._changed_at_us = self._changed_at_us, 0
        return Load(num_slots=8, num_kv_blocks_free=changed_at_us)

    async def _poll(self, what: str, changed_at_us: list[int], every_ms: float) -> None:
        """Publish the changes that a poll with this period would see. This is the yardstick."""
        while True:
            await asyncio.sleep(every_ms / 1e3)
            if changed_at_us:
                told = b"".join(at.to_bytes(8, "big") for at in changed_at_us)
                changed_at_us.clear()
                await self._bus.publish(f"{_POLLED}{what}-{self._name}", told)


def _publish(
    url: str, num_instances: int, rate: float, duration_s: float, pipe: Connection
) -> None:
    async def run() -> None:
        bus = await NatsBus.connect(url, "instances")
        instances = [_Instance(bus, _name(i)) for i in range(num_instances)]
        pipe.send(None)
        rng, num, begins = random.Random(1), 0, time.monotonic()
        at = begins
        while at < begins + duration_s:
            at += rng.expovariate(rate)
            if (wait_s := at - time.monotonic()) > 0:
                await asyncio.sleep(wait_s)
            rng.choice(instances).change()
            num += 1
        await asyncio.sleep(_LATE_S)
        pipe.send((num, time.monotonic() - _LATE_S - begins))
        for task in (t for i in instances for t in i.tasks):
            task.cancel()
        await bus.close()

    asyncio.run(run())


def _name(number: int) -> str:
    return f"prefill-{number}"


# --- the master -----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Ages:
    load_ms: list[float] = field(default_factory=list)
    blocks_ms: list[float] = field(default_factory=list)
    polled_load_ms: list[float] = field(default_factory=list)
    polled_blocks_ms: list[float] = field(default_factory=list)
    num_events: int = 0

    async def hear_polled(self, message: Message) -> None:
        is_load, now_ms = message.subject.startswith(f"{_POLLED}load-"), time.monotonic() * 1e3
        ages = self.polled_load_ms if is_load else self.polled_blocks_ms
        for at in range(0, len(message.data), 8):
            ages.append(now_ms - int.from_bytes(message.data[at : at + 8], "big") / 1e3)


class _TimedFleet(Fleet):
    def __init__(self, ages: _Ages) -> None:
        super().__init__()
        self._ages = ages

    def handle(self, event: Event, now: float) -> None:
        super().handle(event, now)
        if isinstance(event, LoadReported):
            self._ages.num_events += 1
            if event.num_kv_blocks_free:  # an unchanged report that is sent again has 0
                self._ages.load_ms.append(time.monotonic() * 1e3 - event.num_kv_blocks_free / 1e3)


class _TimedIndex(PrefixIndex):
    def __init__(self, ages: _Ages) -> None:
        super().__init__()
        self._ages = ages

    def apply(self, delta: IndexDelta) -> DeltaOutcome:
        outcome = super().apply(delta)
        self._ages.num_events += 1
        now_ms = time.monotonic() * 1e3
        for block in delta.stored:
            self._ages.blocks_ms.append(now_ms - int.from_bytes(block[:8], "big") / 1e3)
        return outcome


class _Known:
    """A registry view that has a fixed set of instances."""

    is_connected = True

    def __init__(self, num_instances: int) -> None:
        names = [_name(i) for i in range(num_instances)]
        self.records = {name: _record(name) for name in names}

    def on_change(self, callback: Callable[[RecordChanged], None]) -> None: ...

    async def close(self) -> None: ...


def _record(name: str) -> InstanceRecord:
    return InstanceRecord(
        instance_id=name,
        incarnation=1,
        service="prefill",
        role=ROLE_PREFILL,
        phase=INSTANCE_PHASE_READY,
        group_id="g0",
        model="m",
        block_size=64,
    )


async def _nothing_before(record: InstanceRecord) -> Snapshot:
    return Snapshot(record.incarnation, 0, ())


async def measure(num_instances: int, rate: float, duration_s: float, folder: Path) -> Staleness:
    """Measure `rate` changes per second at random instances."""
    ages, view = _Ages(), _Known(num_instances)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    async with running(NatsServer(folder / "nats"), folder / "nats.log") as url:
        bus = await NatsBus.connect(url, "master")
        index = IndexFeed(_TimedIndex(ages), bus, view, _nothing_before)
        boards = MonitorBoards(health_board(bus), fault_board(bus))
        fleet = FleetFeed(_TimedFleet(ages), bus, view, boards)
        await bus.subscribe(f"{_POLLED}*", ages.hear_polled)
        await index.start()
        tasks = [asyncio.create_task(index.run()), asyncio.create_task(fleet.run())]
        arguments = (url, num_instances, rate, duration_s, there)
        process = context.Process(target=_publish, args=arguments, daemon=True)
        process.start()
        try:
            await asyncio.to_thread(here.poll, _BEGIN_S)
            here.recv()
            own = ProcessSet({"master": multiprocessing.current_process().pid or 0})
            before, began = own.costs(), time.monotonic()
            await asyncio.to_thread(here.poll, duration_s + _LATE_S + _BEGIN_S)
            num, took_s = here.recv()
            cpu = cpu_between(before, own.costs())["master"] / (time.monotonic() - began)
        finally:
            process.kill()
            process.join()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await index.stop()
            await bus.close()
    return _summed(num_instances, num, took_s, ages, cpu)


def _summed(num_instances: int, num: int, took_s: float, ages: _Ages, cpu: float) -> Staleness:
    load, blocks = sorted(ages.load_ms), sorted(ages.blocks_ms)
    return Staleness(
        num_instances,
        num / took_s,
        ages.num_events / took_s,
        *_spread(load),
        *_spread(blocks),
        num - len(blocks),
        cpu,
        quantile(load, 0.9) / quantile(sorted(ages.polled_load_ms), 0.9),
        quantile(blocks, 0.9) / quantile(sorted(ages.polled_blocks_ms), 0.9),
    )


def _spread(ordered: list[float]) -> tuple[float, float, float]:
    return quantile(ordered, 0.5), quantile(ordered, 0.99), ordered[-1]


# --- the report -----------------------------------------------------------------------------------


def table(found: list[Staleness]) -> str:
    columns = (
        "instances",
        "changes/s",
        "events/s",
        "load p50 / p99 / max ms",
        f"p99 within {LOAD_BAR_MS:.0f}",
        "blocks p50 / p99 / max ms",
        f"p99 within {BLOCKS_BAR_MS:.0f}",
        "p90 to that of polls every 20 / 50 ms",
        "changes lost",
        "CPU of the master's feeds",
    )
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for s in found:
        load = f"{s.load_p50_ms:.1f} / {s.load_p99_ms:.1f} / {s.load_max_ms:.1f}"
        blocks = f"{s.blocks_p50_ms:.1f} / {s.blocks_p99_ms:.1f} / {s.blocks_max_ms:.1f}"
        lines.append(
            f"| {s.num_instances:,} | {s.changes_per_s:,.0f} | {s.events_per_s:,.0f} | {load} | "
            f"{_verdict(s.load_p99_ms, LOAD_BAR_MS)}"
            f" | {blocks} | {_verdict(s.blocks_p99_ms, BLOCKS_BAR_MS)} | "
            f"{s.load_to_polled:.2f} / {s.blocks_to_polled:.2f} | {s.num_lost} | "
            f"{100 * s.master_cpu:.0f} % |"
        )
    return "\n".join(lines)


def _verdict(value_ms: float, bar_ms: float) -> str:
    return "yes" if value_ms <= bar_ms else "**no**"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--instances", default="10,100,1000")
    parser.add_argument(
        "--rate", type=float, default=1000.0, help="changes a second in all (1,000)"
    )
    parser.add_argument("--duration-s", type=float, default=10.0)
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md")
    options = parser.parse_args()
    found = []
    for num_instances in map(int, options.instances.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            asked = measure(num_instances, options.rate, options.duration_s, Path(folder))
            found.append(asyncio.run(asked))
    text = table(found)
    print(text)
    if options.out:
        about = (
            "From a change at an instance (a slot taken, a block stored) to the master's view of "
            "it, over a real NATS. The paper polls loads every 20 ms and cache keys every 50 ms. "
            "Ours are pushed, and these two periods are the bars. All instances are one process "
            "with one connection, the master's feeds are another process, and both share two "
            "cores."
        )
        rows = [asdict(s) for s in found]
        write(
            options.out,
            "loadtests.placement.staleness",
            "How old the master's knowledge is",
            about,
            text,
            found=rows,
        )


if __name__ == "__main__":
    main()

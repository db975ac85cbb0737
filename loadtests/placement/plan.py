"""Measures the cost of one placement decision, in the core and through gRPC, by the number of
workers (`make bench NAME=plan`).

python -m loadtests.placement.plan --out loadtests/results/plan-2026-11-21
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import multiprocessing
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import structlog

from loadtests.harness.processes import ProcessSet, cpu_between
from loadtests.harness.results import quantile, write
from loadtests.traffic.workloads import block_name
from pdmesh.core.groups.membership_changes import GroupTracker
from pdmesh.core.kv.prefix.prefix_index import IndexDelta, PrefixIndex
from pdmesh.core.model import Role
from pdmesh.core.placement.fleet import (
    Fleet,
    InstanceRecorded,
    LoadReported,
    PrefillComputed,
)
from pdmesh.core.placement.instance import Identity
from pdmesh.core.placement.plan import Placement, Plan
from pdmesh.core.placement.policies import Query
from pdmesh.core.request.backpressure import Backpressure
from pdmesh.net.grpc import rpc
from pdmesh.service_process import calm_the_collector
from pdmesh.services.master_scheduler.placement.servicer import PlanningCores, SchedulerServicer
from pdmesh.v1 import scheduler_service_pb2
from pdmesh.v1.scheduler_service_pb2 import PlanQuery, PlanRequest, PlanStreamRequest
from pdmesh.v1.scheduler_service_pb2_grpc import SchedulerServiceStub

NUM_BLOCKS: Final = 128  # blocks of a prompt, each of 64 tokens
_PREFIXES: Final = 64  # different prompts; three prefills hold the first half of each


def build(num_workers: int, prefill_share: float = 0.5) -> tuple[Placement, PrefixIndex]:
    """A fleet of prefills and decodes under load, and an index of the blocks that they hold."""
    rng, fleet, index = random.Random(1), Fleet(), PrefixIndex()
    prefills = [f"prefill-{i}" for i in range(round(num_workers * prefill_share))]
    for role, names in (
        (Role.PREFILL, prefills),
        (Role.DECODE, [f"decode-{i}" for i in range(num_workers - len(prefills))]),
    ):
        for name in names:
            identity = Identity(name, 1, role, "g0", "default", "m", "f", 64, 64, 16384, 131_072)
            fleet.handle(InstanceRecorded(identity), 0.0)
            done = [PrefillComputed(f"x{i}", 1000 * i, 0, 0.02 * i) for i in range(1, 6)]
            report = LoadReported(name, 1, 64, rng.randrange(60), 9000, False, (), done)
            fleet.handle(report, 0.0)
    sequences = dict.fromkeys(prefills, 0)
    for prefix in range(_PREFIXES):
        for name in rng.sample(prefills, min(3, len(prefills))):
            sequences[name] += 1
            blocks = prompt(prefix)[: NUM_BLOCKS // 2]
            index.apply(IndexDelta(name, 1, sequences[name], stored=blocks))
    return Placement(fleet, random.Random(2)), index


def prompt(number: int) -> list[bytes]:
    return [block_name(number, part) for part in range(NUM_BLOCKS)]


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of decisions. Times are in milliseconds, over `num` decisions.

    `cpu_ms` is the CPU of the deciding process per decision. It includes gRPC if gRPC is used.
    """

    how: str
    num_workers: int
    batch: int
    num: int
    per_s: float
    p50_ms: float
    p99_ms: float
    cpu_ms: float


def in_process(num_workers: int, count: int, *, scores_all: bool = False) -> Cost:
    """Measure matches and plans in this process.

    After each plan, reports settle its bookings. A booking is work that the master expects at an
    instance. Times are CPU time, so the machine's other work does not count. With `scores_all`,
    there is no shortlist: all instances are scored.
    """
    placement, index = build(num_workers)
    if scores_all:
        placement.policy = replace(placement.policy, most_scored=0)
    calm_the_collector()  # as a service does
    prompts = [prompt(i) for i in range(_PREFIXES)]
    times, now = [], 0.0
    for number in range(count):
        now += 0.001
        query = Query(
            block_hashes=prompts[number % _PREFIXES],
            num_prompt_tokens=NUM_BLOCKS * 64,
            max_tokens=256,
            request_id=f"r{number}",
        )
        began = time.thread_time()
        matches = index.match(query.block_hashes)
        plan = placement.plan(query, matches, now, num_cached=index.num_blocks_of)
        times.append(time.thread_time() - began)
        assert isinstance(plan, Plan)
        settle(placement, plan, query.request_id, now)
    return _cost("core", num_workers, 1, times, sum(times), count, sum(times))


def settle(placement: Placement, plan: Plan, request_id: str, now: float) -> None:
    """Report for both instances that they accepted the request and computed its prompt."""
    fleet = placement.fleet
    for chosen, is_prefill in ((plan.prefills[0], True), (plan.decodes[0], False)):
        used = fleet.instances[chosen.instance_id].num_slots_used
        done = [PrefillComputed(request_id, NUM_BLOCKS * 64, 0, 0.14)] if is_prefill else []
        report = LoadReported(chosen.instance_id, 1, 64, used, 9000, False, (request_id,), done)
        fleet.handle(report, now)


def _cost(
    how: str,
    num_workers: int,
    batch: int,
    times: Sequence[float],
    wall_s: float,
    count: int,
    cpu_s: float,
) -> Cost:
    ordered = sorted(times)
    p50, p99 = (1e3 * quantile(ordered, q) for q in (0.5, 0.99))
    return Cost(how, num_workers, batch, count, count / wall_s, p50, p99, 1e3 * cpu_s / count)


# --- through gRPC ---------------------------------------------------------------------------------


def _no_rate(scenario: str, now: float) -> float:
    return 0.0


def _serve(num_workers: int, pipe: Connection, prefill_share: float, scores_all: bool) -> None:
    quiet = structlog.make_filtering_bound_logger(logging.INFO)  # a master's default log level
    structlog.configure(wrapper_class=quiet)

    async def serve() -> None:
        placement, index = build(num_workers, prefill_share)
        if scores_all:
            placement.policy = replace(placement.policy, most_scored=0)
        view: Any = None  # only ListGroups reads the view
        cores = PlanningCores(placement, index, Backpressure(_no_rate))
        servicer = SchedulerServicer(cores, GroupTracker(), view, lambda: (True, 1))
        server = rpc.server()
        service = scheduler_service_pb2.DESCRIPTOR.services_by_name["SchedulerService"]
        rpc.add_service(server, service, servicer)
        pipe.send(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        calm_the_collector()
        await server.wait_for_termination()

    asyncio.run(serve())


@contextmanager
def master(
    num_workers: int, prefill_share: float = 0.5, *, scores_all: bool = False
) -> Iterator[tuple[int, ProcessSet]]:
    """A master's gRPC service in its own process. Yields its port and its set of processes.

    The instances of its fleet send no reports, so bookings expire.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    arguments = (num_workers, there, prefill_share, scores_all)
    process = context.Process(target=_serve, args=arguments, daemon=True)
    process.start()
    try:
        assert process.pid is not None
        yield here.recv(), ProcessSet({"master": process.pid})
    finally:
        process.kill()
        process.join()


async def ask(
    port: int, processes: ProcessSet, num_workers: int, batch: int, num_streams: int, count: int
) -> Cost:
    """Measure plans through gRPC.

    Each stream stands for a gateway. It has one message of `batch` queries under way at a time.
    """
    queries = [
        PlanQuery(
            request_id=f"q{i}",
            block_hashes=prompt(i % _PREFIXES),
            num_prompt_tokens=NUM_BLOCKS * 64,
            max_tokens=256,
        )
        for i in range(batch)
    ]
    request = PlanStreamRequest(request=PlanRequest(gateway_id="bench", queries=queries))
    times: list[float] = []
    channel = rpc.channel(f"127.0.0.1:{port}")
    # the stubs have no type for calls without an iterator
    stub: Any = SchedulerServiceStub(channel)

    async def gateway() -> None:
        call = stub.PlanStream()
        for _ in range(count // num_streams // batch):
            began = time.perf_counter()
            await call.write(request)
            response = await call.read()
            times.append(time.perf_counter() - began)
            assert len(response.response.results) == batch
        await call.done_writing()

    before, began = processes.costs(), time.perf_counter()
    await asyncio.gather(*(gateway() for _ in range(num_streams)))
    wall_s = time.perf_counter() - began
    cpu_s = cpu_between(before, processes.costs())["master"]
    await channel.close(None)
    how = f"gRPC, {num_streams} gateway{'s' * (num_streams > 1)}"
    return _cost(how, num_workers, batch, times, wall_s, len(times) * batch, cpu_s)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--workers", default="10,100,1000")
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md")
    options = parser.parse_args()
    costs = []
    for num_workers in map(int, options.workers.split(",")):
        costs.append(in_process(num_workers, options.count))
        with master(num_workers) as (port, processes):
            for batch, streams in ((1, 1), (1, 4), (16, 2)):
                asked = ask(port, processes, num_workers, batch, streams, options.count)
                costs.append(asyncio.run(asked))
    lines = [
        "| where | workers | queries a message | decisions/s | p50 ms | p99 ms | CPU ms |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        (
            f"| {c.how} | {c.num_workers} | {c.batch} | {c.per_s:,.0f} | {c.p50_ms:.3f} | "
            f"{c.p99_ms:.3f} | {c.cpu_ms:.3f} |"
        )
        for c in costs
    ]
    text = "\n".join(lines)
    print(text)
    if options.out:
        write(
            options.out,
            "loadtests.placement.plan",
            "The cost of a placement decision",
            f"Prompts of {NUM_BLOCKS} blocks; half of the workers are prefills. In the core, times "
            "are CPU time of one query. Through gRPC, they are wall time of one message with all "
            "its queries, while client and master share the machine. CPU is the master's, for one "
            "query.",
            text,
            costs=[asdict(cost) for cost in costs],
        )


if __name__ == "__main__":
    main()

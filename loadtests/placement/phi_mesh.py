"""Throughput per instance, Phi (S2), as the master's own metrics predict it for another split,
compared with what a mesh of that split carries.

    python -m loadtests.placement.phi_mesh --out FILE    # about 2 minutes, on a quiet machine

A split is a number of prefills and decodes. Each workload runs on two real meshes of sim instances,
one after the other. T_p, T_d, b_p and b_d are read from the first master's /metrics while the mesh
is full. Formula (1) then predicts the throughput with n_p and n_d of the second mesh, and the
second mesh's answers are measured. The prediction does not use the sim engine's law. The law only
sets how long instances take, which is long compared with the mesh's own cost.

There are twice as many users as slots, and users send without a pause, so both meshes are full. The
same role is the bottleneck in both, because b / T is a capacity only if all slots are taken. The
report also has the Phi of the second mesh by its own metrics.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

from loadtests.harness.results import spread_table, write
from loadtests.traffic.loops import Answer, Target, closed_loop
from loadtests.traffic.workloads import Arrival, block_name
from pdmesh.core.ratio.throughput import Profile, Split
from pdmesh.launcher.mesh import Mesh
from pdmesh.launcher.spec import MeshSpec

_BLOCK: Final = 64  # tokens
_PREFILL_BLOCKS: Final = 1024  # room for all prefixes
_NUM_PREFIXES: Final = (
    2  # few, since the master's means include a prefix's first, cold use for dozens of requests
)
_LOOK_S: Final = 0.5
_PREFIX: Final = "pdmesh_scenario_"
_WARM_SHARE: Final = 0.35  # this share of a run passes before batches, caches and means are steady


@dataclass(frozen=True, slots=True)
class Workload:
    """A request's lengths in tokens, the slots of an instance, and the two splits.

    The mesh with split `profiled` predicts the throughput of the mesh with split `predicted`.
    Answers are up to a quarter longer or shorter, so that the answers of a batch do not all end at
    once.
    """

    name: str
    num_tokens: int
    prefix_tokens: int
    num_output: int
    prefill_slots: int
    decode_slots: int
    profiled: Split
    predicted: Split


WORKLOADS: Final = (
    Workload("documents", 1000, 256, 8, 2, 16, profiled=Split(1, 1), predicted=Split(3, 1)),
    Workload("long answers", 128, 64, 64, 2, 8, profiled=Split(1, 1), predicted=Split(1, 3)),
    Workload("chats over a long prefix", 1500, 1280, 40, 2, 4, profiled=Split(1, 1),
        predicted=Split(1, 2)),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Exported:
    """A scenario's metrics at one time: T_p and T_d in seconds, and the slots of one instance."""

    t_p: float
    t_d: float
    b_p: float
    b_d: float


@dataclass(frozen=True, slots=True)
class Ran:
    """The results of one full mesh.

    `profile` has the means that the master exported. `phi` is in answers/s per instance.
    """

    profile: Profile
    phi: float
    num_answered: int
    num_unanswered: int


@dataclass(frozen=True, slots=True)
class Checked:
    """The check of one workload. Rates are in requests/s per instance, times in seconds.

    `of_itself` is Phi by the predicted mesh's own metrics.
    """

    workload: str
    seed: int
    profiled: str
    t_p: float
    b_p: float
    t_d: float
    b_d: float
    split: str
    bottleneck: str
    predicted: float
    measured: float
    error_percent: float
    of_itself_error_percent: float
    num_answered: int
    num_unanswered: int


def check(workload: Workload, seed: int, law: str, duration_s: float) -> Checked:
    first = asyncio.run(_run(workload, workload.profiled, seed, law, duration_s))
    second = asyncio.run(_run(workload, workload.predicted, seed, law, duration_s))
    phi = first.profile.phi(workload.predicted)
    of_itself = second.profile.phi(workload.predicted)
    return Checked(
        workload.name,
        seed,
        str(workload.profiled),
        first.profile.t_p,
        first.profile.b_p,
        first.profile.t_d,
        first.profile.b_d,
        str(workload.predicted),
        phi.bottleneck,
        phi.value,
        second.phi,
        100 * (phi.value - second.phi) / second.phi,
        100 * (of_itself.value - second.phi) / second.phi,
        second.num_answered,
        first.num_unanswered + second.num_unanswered,
    )


async def _run(workload: Workload, split: Split, seed: int, law: str, duration_s: float) -> Ran:
    slots = split.num_prefill * workload.prefill_slots + split.num_decode * workload.decode_slots
    _say(f"{workload.name}: {split}, {2 * slots} users, {duration_s:.0f} s")
    with tempfile.TemporaryDirectory(prefix="pdmesh-phi-") as directory:
        async with Mesh(_spec(workload, split, law), Path(directory)) as mesh:
            looks: list[Exported] = []
            watching = asyncio.create_task(
                _watch(mesh.ops_address("master-scheduler"), duration_s, looks)
            )
            answers = await closed_loop(
                Target.at(mesh.http_url),
                2 * slots,
                _requests(workload, random.Random(seed)).__next__,
                think_s=lambda: 0.0,
                duration_s=duration_s,
            )
            await watching
    return _ran(answers, looks, split, duration_s)


def _ran(
    answers: Sequence[Answer], looks: Sequence[Exported], split: Split, duration_s: float
) -> Ran:
    since = _WARM_SHARE * duration_s
    answered = [a for a in answers if a.is_answered]
    full = [a for a in answered if since <= a.sent_at + a.e2e_s <= duration_s]
    means = [statistics.fmean(look) for look in zip(*map(_numbers, looks), strict=True)]
    profile = Profile(t_p=means[0], t_d=means[1], b_p=means[2], b_d=means[3])
    per_s = len(full) / (duration_s - since)
    return Ran(profile, per_s / split.total, len(answered), len(answers) - len(answered))


def _numbers(look: Exported) -> tuple[float, float, float, float]:
    return look.t_p, look.t_d, look.b_p, look.b_d


async def _watch(ops_address: str, duration_s: float, looks: list[Exported]) -> None:
    """Read the metrics at intervals while the mesh is full, as a monitoring system does."""
    since = _WARM_SHARE * duration_s
    await asyncio.sleep(since)
    for _ in range(round((duration_s - since) / _LOOK_S)):
        looks.append(exported(await asyncio.to_thread(_page, ops_address)))
        await asyncio.sleep(_LOOK_S)


def _page(ops_address: str) -> str:
    with urllib.request.urlopen(f"http://{ops_address}/metrics", timeout=5) as page:
        return str(page.read(), "utf-8")


def scenario_metrics(page: str, scenario: str) -> dict[str, float]:
    """The metrics that a master exports about a scenario.

    A name has no `pdmesh_scenario_` and no unit. The label for a role or a term follows the name
    after a /.
    """
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if not sample.name.startswith(_PREFIX) or sample.labels.get("scenario") != scenario:
                continue
            name = sample.name.removeprefix(_PREFIX)
            name = name.removesuffix("_ratio").removesuffix("_seconds")
            which = sample.labels.get("role") or sample.labels.get("term")
            found[f"{name}/{which}" if which else name] = sample.value
    return found


def exported(page: str, scenario: str = "default") -> Exported:
    """A scenario's terms of Phi. Raises KeyError if a term is missing."""
    found = scenario_metrics(page, scenario)
    b_p, b_d = (found[f"slots/{r}"] / found[f"instances/{r}"] for r in ("prefill", "decode"))
    return Exported(found["t_p"], found["t_d"], b_p, b_d)


def _requests(workload: Workload, rng: random.Random) -> Iterator[Arrival]:
    prefixes = [
        tuple(block_name(-1 - number, part) for part in range(workload.prefix_tokens // _BLOCK))
        for number in range(_NUM_PREFIXES)
    ]
    for number in itertools.count():
        num_output = round(workload.num_output * rng.uniform(0.75, 1.25))
        yield Arrival(float(number), workload.num_tokens, num_output, rng.choice(prefixes))


def _spec(workload: Workload, split: Split, law: str) -> MeshSpec:
    shared = {"SIM_LAW": law, "SIM_EOS_PERIOD": "0"}
    prefill = {
        **shared,
        "NUM_SLOTS": str(workload.prefill_slots),
        "NUM_KV_BLOCKS": str(_PREFILL_BLOCKS),
    }
    decode = {
        **shared,
        "NUM_SLOTS": str(workload.decode_slots),
        "MAX_RETRIEVALS": str(workload.decode_slots),
    }
    return MeshSpec(
        engine="sim",
        num_prefill=split.num_prefill,
        num_decode=split.num_decode,
        http_port=0,
        grpc_port=0,
        service_env={
            "prefill": {f"PDMESH_PREFILL_{key}": value for key, value in prefill.items()},
            "decode": {f"PDMESH_DECODE_{key}": value for key, value in decode.items()},
            "gateway": {"PDMESH_GATEWAY_TTFT_S": "30"},
        },
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


_COLUMNS: Final[tuple[tuple[str, Callable[[Checked], float], str], ...]] = (
    ("T_p ms", lambda c: 1e3 * c.t_p, ".0f"),
    ("b_p", lambda c: c.b_p, ".0f"),
    ("T_d ms", lambda c: 1e3 * c.t_d, ".0f"),
    ("b_d", lambda c: c.b_d, ".0f"),
    ("predicted", lambda c: c.predicted, ".3f"),
    ("measured", lambda c: c.measured, ".3f"),
    ("error %", lambda c: c.error_percent, ".1f"),
    ("error of its own metrics %", lambda c: c.of_itself_error_percent, ".1f"),
    ("answered", lambda c: c.num_answered, ".0f"),
    ("not answered", lambda c: c.num_unanswered, ".0f"),
)


def table(checks: Sequence[Checked]) -> str:
    """A Markdown table of medians (lowest..highest) over the seeds."""
    by_workload: dict[str, list[Checked]] = {}
    for checked in checks:
        by_workload.setdefault(checked.workload, []).append(checked)
    rows = [
        ((name, own[0].profiled, own[0].split, own[0].bottleneck), own)
        for name, own in by_workload.items()
    ]
    first = ("workload", "profiled P:D", "predicted P:D", "binds")
    return spread_table(first, _COLUMNS, rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--law", default="smollm2-cpu")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--duration-s", type=float, default=16.0, help="of each run on each mesh")
    parser.add_argument("--only", help="one workload, by its name")
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md")
    options = parser.parse_args()
    workloads = [w for w in WORKLOADS if options.only in (None, w.name)]
    checks = [
        check(workload, seed, options.law, options.duration_s)
        for seed in range(1, options.seeds + 1)
        for workload in workloads
    ]
    text = table(checks)
    print(text)
    worst = max(abs(c.error_percent) for c in checks)
    verdict = f"The largest error is {worst:.1f} %; the bar is 15 % (S2)."
    print(verdict)
    if options.out:
        write(
            options.out,
            "loadtests.placement.phi_mesh",
            "Phi on real meshes: predicted from the master's metrics of one split, measured on "
            "another",
            f"Real processes and KV transfer, sim engines at the law `{options.law}`; clients, "
            "mesh and servers share the cores. Requests/s per"
            " instance. T_p, b_p, T_d and b_d are what the master of the profiled mesh exported "
            "while it was full; b_d with the few requests"
            " that a decode takes beyond those that run.",
            f"{text}\n\n{verdict}",
            checks=[asdict(c) for c in checks],
        )


if __name__ == "__main__":
    main()

"""A, 2A, 3A and 4A users on a mesh of sim instances: on-demand forwarding against queues (S7, S45,
S62, S65).

A is 24 unless `--users` gives another number.

    python -m loadtests.users --out loadtests/results/users-2026-11-22

With on-demand forwarding, a prefill accepts or rejects each prompt, and the gateway keeps rejected
prompts in a waiting room. In the baseline, each prefill has a long queue, and the gateway chooses
the shortest queue from reports that are 100 ms old. A report says how many tokens of the queued
prompts are left to compute, which the reports in P/D-Serve's paper do not say. Prompts and SLO are
the same for both (`plan.py`). The record also has two simulations of the run with the most users,
on a virtual clock: the same run, and a run whose queues are reported at once.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Awaitable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from loadtests.harness.results import write
from loadtests.sim.users import UsersMesh
from loadtests.traffic.loops import Answer, Target, closed_loop
from loadtests.users.plan import (
    BLOCK_SIZE,
    CAPACITY_PER_S,
    DECODE_SLOTS,
    LAW,
    MEAN_PREFILL_S,
    NUM_DECODE,
    NUM_OUTPUT,
    NUM_PREFILL,
    NUM_TOKENS,
    ON_DEMAND,
    PREFIX_TOKENS,
    QUEUES,
    Prompts,
    Variant,
    thinking,
)
from loadtests.users.report import (
    Point,
    bars,
    draw,
    point,
    table,
)
from pdmesh.launcher.mesh import Mesh
from pdmesh.launcher.spec import MeshSpec

_WARM_S: Final = 6.0  # seconds with the most users; afterwards, every prefill holds every prefix
_PAUSE_S: Final = 1.0  # pause between two points, so that requests that were cut off can end


def _spec(variant: Variant, slo_s: float) -> MeshSpec:
    shared = {"SIM_LAW": LAW.name, "SIM_EOS_PERIOD": "0"}
    prefill = {**shared, "NUM_SLOTS": str(variant.prefill_slots)}
    decode = {**shared, "NUM_SLOTS": str(DECODE_SLOTS), "MAX_RETRIEVALS": str(DECODE_SLOTS)}
    return MeshSpec(
        engine="sim",
        num_prefill=NUM_PREFILL,
        num_decode=NUM_DECODE,
        http_port=0,
        grpc_port=0,
        service_env={
            "prefill": {f"PDMESH_PREFILL_{key}": value for key, value in prefill.items()},
            "decode": {f"PDMESH_DECODE_{key}": value for key, value in decode.items()},
            "master-scheduler": {"PDMESH_MASTER_SCHEDULER_POLICY": variant.policy},
            "gateway": {"PDMESH_GATEWAY_TTFT_S": str(slo_s)},
        },
    )


async def _on_mesh(
    variant: Variant, users: Sequence[int], options: argparse.Namespace
) -> list[Point]:
    points = []
    with tempfile.TemporaryDirectory(prefix="pdmesh-users-") as directory:
        async with Mesh(_spec(variant, options.slo_s), Path(directory), report=_say) as mesh:
            target, prompts = Target.at(mesh.http_url, block_size=BLOCK_SIZE), Prompts(1)

            def ask(num_users: int, duration_s: float) -> Awaitable[list[Answer]]:
                think_s = thinking(num_users, options.think_s)
                return closed_loop(
                    target, num_users, prompts, think_s=think_s, duration_s=duration_s
                )

            await ask(max(users), _WARM_S)
            for num_users in users:
                await asyncio.sleep(_PAUSE_S)
                answers = await ask(num_users, options.duration_s)
                found = point(variant.name, num_users, answers, options.slo_s, options.duration_s)
                points.append(found)
                _say(f"{found}")
    return points


def _simulated(num_users: int, options: argparse.Namespace) -> tuple[list[Point], list[float]]:
    """The simulated points, and the errors of each variant's TTFT estimates, in ms."""
    points, errors = [], []
    for name, variant, report_s in (
        (ON_DEMAND.name, ON_DEMAND, None),
        (QUEUES.name, QUEUES, None),
        ("queues, shortest as it is reported at once", QUEUES, 0.0),
    ):
        mesh = UsersMesh(
            variant,
            num_users,
            slo_s=options.slo_s,
            think_s=options.think_s,
            until=_WARM_S + options.duration_s,
            report_s=report_s,
        )
        answers = mesh.answers(since=_WARM_S)
        points.append(point(name, num_users, answers, options.slo_s, options.duration_s))
        errors.append(1e3 * mesh.estimate_error_s(since=_WARM_S))
    return points, errors


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--users", default="24,48,72,96", help="numbers of users: A, 2A, 3A, 4A")
    parser.add_argument("--slo-s", type=float, default=0.5)
    parser.add_argument("--think-s", type=float, default=1.0)
    parser.add_argument("--duration-s", type=float, default=16.0)
    parser.add_argument("--out", type=Path, help="write OUT.json, OUT.md and OUT.png")
    options = parser.parse_args()
    users = [int(each) for each in options.users.split(",")]
    points = [
        each
        for variant in (ON_DEMAND, QUEUES)
        for each in asyncio.run(_on_mesh(variant, users, options))
    ]
    twins, errors = _simulated(max(users), options)
    offs = ", ".join(f"{p.variant} {e:.0f} ms" for p, e in zip(twins, errors, strict=True))
    text = (
        f"{table(points)}\n\n{bars(points)}\n\n{max(users)} users on a virtual clock "
        f"(simulated):\n\n{table(twins)}\n\n"
        f"TTFT as it was expected when a request was placed is off by (mean, absolute; S7): {offs}."
    )
    print(text)
    if options.out:
        prefixes = ", ".join(str(each) for each in PREFIX_TOKENS)
        write(
            options.out,
            "loadtests.users",
            "Users from A to 4A",
            f"{NUM_PREFILL} prefills, {NUM_DECODE} decodes, sim at the law `{LAW.name}`; real "
            f"processes, real KV transfer. Prompts of {NUM_TOKENS}"
            f" tokens, of which the first {prefixes} are shared with others, answers of "
            f"{NUM_OUTPUT}. Alone, with its prefix found, a prompt takes"
            f" {1e3 * MEAN_PREFILL_S:.0f} ms on average, so n_p b_p / T_p is {CAPACITY_PER_S:.1f} "
            f"requests/s. Success: first token within {options.slo_s} s.",
            text,
            capacity_per_s=CAPACITY_PER_S,
            points=[asdict(each) for each in points],
            simulated=[asdict(each) for each in twins],
            estimate_error_ms=errors,
        )
        draw(points, options.slo_s, options.out.with_suffix(".png"))


if __name__ == "__main__":
    main()

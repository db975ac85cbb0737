"""Users in a closed loop: their number grows in each scenario until one of its requests misses its
SLO (S65).

    python -m loadtests.traffic.until_failure --out loadtests/results/until-failure-2026-11-22

The six scenarios of two services run on one mesh. Each has its own group (one prefill, one decode),
so scenarios do not affect each other (S4). All scenarios get more users at the same time, level by
level. A level lasts --duration-s. A scenario whose requests all met their SLO gets 1.5 times as
many users. After a request has missed its SLO, the scenario stays at its last good number. The
report compares the last good rate with the rate that formula (1) promises for the scenario's
profile.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from loadtests.harness.progress import Progress
from loadtests.harness.results import quantile, write
from loadtests.sim.profile import profile
from loadtests.traffic.loops import Answer, Target, closed_loop
from loadtests.traffic.services import (
    DECODE_SLOTS,
    PREFILL_SLOTS,
    SCENARIOS,
    Requests,
    Scenario,
    mesh_spec,
)
from pdmesh.core.ratio.throughput import Split
from pdmesh.engine.step_time_laws import LAWS
from pdmesh.launcher.mesh import Mesh

_MAX_LEVELS: Final = 12
_THINK_S: Final = 0.05  # the longest pause; the mean is half as long


@dataclass(slots=True)
class Ramp:
    """The number of one scenario's users, level by level.

    `best` is the last number at which all requests kept their SLO.
    """

    users: int
    best: int = 0
    best_rate: float = 0.0
    has_failed: bool = False

    def after(self, success: float, rate_per_s: float) -> None:
        """End a level, in which a share `success` of the requests kept their SLO."""
        if self.has_failed:
            return
        if success < 1.0:
            self.has_failed = True
            self.users = max(1, self.best)
            return
        self.best, self.best_rate = self.users, rate_per_s
        self.users = max(self.users + 1, round(1.5 * self.users))


@dataclass(frozen=True, slots=True)
class Level:
    """The result of one scenario at one number of users.

    A level is short. So `per_s` is computed as the number of users divided by the mean time of a
    turn.
    """

    scenario: str
    service: str
    num_users: int
    num_requests: int
    success: float
    per_s: float
    ttft_ms_p95: float
    e2e_ms_p95: float


async def measure(law: str, scenarios: Sequence[Scenario], duration_s: float) -> list[Level]:
    levels: list[Level] = []
    progress = Progress(_MAX_LEVELS)
    ramps = {s.name: Ramp(2) for s in scenarios}
    asks = {s.name: Requests(i, s) for i, s in enumerate(scenarios)}
    with tempfile.TemporaryDirectory(prefix="pdmesh-until-") as directory:
        async with Mesh(mesh_spec(law, scenarios), Path(directory)) as mesh:
            target = Target.at(mesh.http_url, names_scenario=True)
            for _ in range(_MAX_LEVELS):
                now = [s for s in scenarios if not ramps[s.name].has_failed]
                if not now:
                    break
                users = ", ".join(f"{s.name} {ramps[s.name].users}" for s in now)
                progress.step(f"users: {users}")
                found = await asyncio.gather(
                    *(
                        _level(target, s, ramps[s.name].users, asks[s.name], duration_s)
                        for s in scenarios
                    )
                )
                for scenario, level in zip(scenarios, found, strict=True):
                    if scenario in now:
                        levels.append(level)
                        ramps[scenario.name].after(level.success, level.per_s)
    progress.close()
    return levels


async def _level(
    target: Target, scenario: Scenario, num_users: int, ask: Requests, duration_s: float
) -> Level:
    rng = random.Random(num_users)
    answers = await closed_loop(
        target, num_users, ask, think_s=lambda: rng.uniform(0.0, _THINK_S), duration_s=duration_s
    )
    return level_of(scenario, num_users, answers)


def level_of(scenario: Scenario, num_users: int, answers: Sequence[Answer]) -> Level:
    done = [a for a in answers if a.is_answered]
    good = sum(a.e2e_s <= scenario.slo_s for a in done)
    turn_s = sum(a.e2e_s for a in done) / max(1, len(done)) + _THINK_S / 2
    return Level(
        scenario.name,
        scenario.service,
        num_users,
        len(answers),
        good / max(1, len(answers)),
        num_users / turn_s if done else 0.0,
        _p95([1e3 * a.ttft_s for a in done]),
        _p95([1e3 * a.e2e_s for a in done]),
    )


def _p95(values: Sequence[float]) -> float:
    return quantile(sorted(values) or [0.0], 0.95)


def promised_per_s(law: str, scenario: Scenario) -> float:
    """The rate that one prefill and one decode can carry by their profile.

    It assumes that each prompt's prefix is cached.
    """
    profiled = profile(
        LAWS[law],
        num_prompt=scenario.num_tokens,
        num_output=scenario.num_output,
        prefill_slots=PREFILL_SLOTS,
        decode_slots=DECODE_SLOTS,
        num_cached=scenario.prefix_tokens,
    )
    phi = profiled.phi(Split(1, 1))
    return min(phi.prefill, phi.decode)


def table(law: str, scenarios: Sequence[Scenario], levels: Sequence[Level]) -> str:
    lines = [
        (
            "| service | scenario | SLO s | users, last good | requests/s | of the promised | "
            "TTFT p95 ms | E2E p95 ms | users, first failing | success % there |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for scenario in scenarios:
        own = [level for level in levels if level.scenario == scenario.name]
        good = [level for level in own if level.success == 1.0]
        best = good[-1] if good else replace(own[0], num_users=0, per_s=0.0)
        failed = next((level for level in own if level.success < 1.0), None)
        share = best.per_s / promised_per_s(law, scenario)
        ending = f"{failed.num_users} | {100 * failed.success:.1f}" if failed else "none | -"
        lines.append(
            f"| {scenario.service} | {scenario.name} | {scenario.slo_s} | {best.num_users} | "
            f"{best.per_s:.1f} | {share:.2f} |"
            f" {best.ttft_ms_p95:.0f} | {best.e2e_ms_p95:.0f} | {ending} |"
        )
    return "\n".join(lines)


def _draw(scenarios: Sequence[Scenario], levels: Sequence[Level], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(14, 4.5))
    panels: tuple[tuple[str, Callable[[Level, Scenario], float]], ...] = (
        ("answers within their SLO, %", lambda level, _: 100 * level.success),
        ("requests/s", lambda level, _: level.per_s),
        ("E2E p95 / SLO", lambda level, scenario: level.e2e_ms_p95 / 1e3 / scenario.slo_s),
    )
    for axis, (title, value) in zip(axes, panels, strict=True):
        for scenario in scenarios:
            own = [level for level in levels if level.scenario == scenario.name]
            values = [value(level, scenario) for level in own]
            label = f"{scenario.service}/{scenario.name}"
            axis.plot([level.num_users for level in own], values, "o-", label=label)
        axis.set_title(title)
        axis.set_xlabel("users")
        axis.set_ylim(bottom=0)
    axes[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--duration-s", type=float, default=6.0, help="duration of each level")
    parser.add_argument("--law", choices=sorted(LAWS), default="smollm2-cpu")
    parser.add_argument(
        "--first", type=int, default=len(SCENARIOS), help="use only the first scenarios"
    )
    parser.add_argument("--out", type=Path, help="write OUT.json, OUT.md and OUT.png")
    options = parser.parse_args()
    scenarios = SCENARIOS[: options.first]
    levels = asyncio.run(measure(options.law, scenarios, options.duration_s))
    text = table(options.law, scenarios, levels)
    print(text)
    if options.out:
        write(
            options.out,
            "loadtests.traffic.until_failure",
            "Users until the first failure, by scenario",
            f"Real processes, real KV transfer, sim engines at the law `{options.law}`; clients, "
            "mesh and servers share the cores.",
            text,
            levels=[asdict(level) for level in levels],
        )
        _draw(scenarios, levels, options.out.with_suffix(".png"))


if __name__ == "__main__":
    main()

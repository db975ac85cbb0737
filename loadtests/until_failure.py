"""Users in a closed loop, more and more of them until one of their requests fails its SLO, by scenario (S65).

    python -m loadtests.until_failure --out loadtests/results/until-failure-2026-11-21

Six scenarios of two services, each with a group of its own (one prefill, one decode) on one mesh, so that what one carries says nothing
of the others (S4). All ramp at once: a level lasts --duration-s; a scenario whose requests all kept their SLO gets half as many users
again, one that failed stays at its last good number. The last good rate is given beside what its profile promises (normalised: 1).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from loadtests.results import write
from loadtests.traffic import Answer, Target, closed_loop
from loadtests.workloads import Arrival, block_name
from pdmesh.core.ratio_model import Split
from pdmesh.engine.laws import LAWS
from pdmesh.engine.profile import profile
from pdmesh.launcher.mesh import Mesh
from pdmesh.launcher.spec import MeshSpec

PREFILL_SLOTS: Final = 2
DECODE_SLOTS: Final = 32
_MAX_LEVELS: Final = 12
_THINK_S: Final = 0.05  # at most, and half of it on average


@dataclass(frozen=True, slots=True)
class Scenario:
    """Tokens; the SLO is on the whole answer, in seconds."""

    service: str
    name: str
    num_tokens: int
    prefix_tokens: int
    num_output: int
    slo_s: float


SCENARIOS: Final = (
    Scenario("assistant", "chat", 340, 192, 7, 1.5),
    Scenario("assistant", "summary", 1500, 128, 24, 4.0),
    Scenario("assistant", "translate", 256, 64, 32, 4.0),
    Scenario("coder", "complete", 700, 512, 4, 1.5),
    Scenario("coder", "explain", 500, 128, 48, 5.0),
    Scenario("coder", "review", 2500, 832, 32, 6.0),
)


@dataclass(slots=True)
class Ramp:
    """One scenario's users, level by level. `best` is the last number whose requests all kept their SLO."""

    users: int
    best: int = 0
    best_rate: float = 0.0
    has_failed: bool = False

    def after(self, success: float, rate_per_s: float) -> None:
        """A level is over: `success` is the share of requests that kept their SLO."""
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
    """What one scenario did at one number of users. `per_s`: users over the mean time of a turn, since a level is short."""

    scenario: str
    service: str
    num_users: int
    num_requests: int
    success: float
    per_s: float
    ttft_ms_p95: float
    e2e_ms_p95: float


def _spec(law: str, scenarios: Sequence[Scenario]) -> MeshSpec:
    env = {"SIM_LAW": law, "SIM_EOS_PERIOD": "0"}
    service_env: dict[str, dict[str, str]] = {}
    for number, scenario in enumerate(scenarios):
        own = {"SCENARIO": scenario.name, "GROUP_ID": f"{scenario.service}-{scenario.name}"}
        for role, slots in (("prefill", PREFILL_SLOTS), ("decode", DECODE_SLOTS)):
            values = {**env, **own, "NUM_SLOTS": str(slots), "MAX_RETRIEVALS": str(slots)}
            service_env[f"{role}-{number}"] = {
                f"PDMESH_{role.upper()}_{key}": value for key, value in values.items()
            }
    return MeshSpec(
        engine="sim",
        num_prefill=len(scenarios),
        num_decode=len(scenarios),
        http_port=0,
        grpc_port=0,
        service_env=service_env,
    )


def _target(url: str) -> Target:
    parts = urlsplit(url)
    assert parts.hostname is not None
    return Target(parts.hostname, parts.port or 80, names_scenario=True)


class _Requests:
    """A scenario's prompts: its prefix, then what no other request has."""

    def __init__(self, number: int, scenario: Scenario) -> None:
        self._scenario, self._numbers = scenario, itertools.count(number * 1_000_000)
        self._blocks = tuple(
            block_name(-1 - number, i) for i in range(scenario.prefix_tokens // 64)
        )

    def __call__(self) -> Arrival:
        own = self._scenario
        return Arrival(
            float(next(self._numbers)), own.num_tokens, own.num_output, self._blocks, own.name
        )


async def measure(law: str, scenarios: Sequence[Scenario], duration_s: float) -> list[Level]:
    levels: list[Level] = []
    ramps = {s.name: Ramp(2) for s in scenarios}
    asks = {s.name: _Requests(i, s) for i, s in enumerate(scenarios)}
    with tempfile.TemporaryDirectory(prefix="pdmesh-until-") as directory:
        async with Mesh(_spec(law, scenarios), Path(directory), report=_say) as mesh:
            target = _target(mesh.http_url)
            for _ in range(_MAX_LEVELS):
                now = [s for s in scenarios if not ramps[s.name].has_failed]
                if not now:
                    break
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
                        _say(f"{level}")
    return levels


async def _level(
    target: Target, scenario: Scenario, num_users: int, ask: _Requests, duration_s: float
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
    ordered = sorted(values)
    return ordered[int(0.95 * (len(ordered) - 1))] if ordered else 0.0


def promised_per_s(law: str, scenario: Scenario) -> float:
    """What one prefill and one decode carry by their profile, with the prefix found cached."""
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
        "| service | scenario | SLO s | users, last good | requests/s | of the promised | TTFT p95 ms | E2E p95 ms | users, first failing | success % there |",
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
            f"| {scenario.service} | {scenario.name} | {scenario.slo_s} | {best.num_users} | {best.per_s:.1f} | {share:.2f} |"
            f" {best.ttft_ms_p95:.0f} | {best.e2e_ms_p95:.0f} | {ending} |"
        )
    return "\n".join(lines)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--duration-s", type=float, default=6.0, help="of each level")
    parser.add_argument("--law", choices=sorted(LAWS), default="smollm2-cpu")
    parser.add_argument("--first", type=int, default=len(SCENARIOS), help="so many scenarios")
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md")
    options = parser.parse_args()
    scenarios = SCENARIOS[: options.first]
    levels = asyncio.run(measure(options.law, scenarios, options.duration_s))
    text = table(options.law, scenarios, levels)
    print(text)
    if options.out:
        write(
            options.out,
            "loadtests.until_failure",
            "Users until the first failure, by scenario",
            f"Real processes, real KV transfer, sim engines at the law `{options.law}`; clients, mesh and servers share the cores.",
            text,
            levels=[asdict(level) for level in levels],
        )


if __name__ == "__main__":
    main()

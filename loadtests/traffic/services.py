"""Defines two services with three scenarios each, and a mesh with one group per scenario (S4).

Each group has one prefill and one decode.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from loadtests.traffic.workloads import Arrival, block_name
from pdmesh.launcher.spec import MeshSpec

PREFILL_SLOTS: Final = 2
DECODE_SLOTS: Final = 32


@dataclass(frozen=True, slots=True)
class Scenario:
    """One scenario. Lengths are in tokens. The SLO is for the whole answer, in seconds."""

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


class Requests:
    """Makes the requests of a scenario.

    Each prompt is the scenario's prefix, followed by tokens that no other prompt has.
    """

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


def mesh_spec(law: str, scenarios: Sequence[Scenario]) -> MeshSpec:
    """A mesh of sim instances that compute by `law`."""
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


def arrivals(rng: random.Random, num_requests: int, rate_per_s: float) -> list[Arrival]:
    """Requests of random scenarios at Poisson times."""
    asks = [Requests(number, scenario) for number, scenario in enumerate(SCENARIOS)]
    now, found = 0.0, []
    for _ in range(num_requests):
        now += rng.expovariate(rate_per_s)
        found.append(replace(rng.choice(asks)(), at_s=now))
    return found

"""The plan of the compressed day on a mesh: traffic, changes of content, loans, faults, an upgrade.

The mesh's own times (leases, windows, soak, the minutes of its cron schedule) do not shrink with
the day. So the run is as long as they need.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from typing import Final

from loadtests.sim.load import Lengths, poisson
from loadtests.traffic.workloads import Arrival

DAY_S: Final = 86_400.0
LENGTH_S: Final = 300.0  # the length of the run
SPEED: Final = DAY_S / LENGTH_S
SCENARIO: Final = "chat"
WINDOW_S: Final = 5.0
E2E_SLO_S: Final = 10.0

# All times below are in seconds of the run. The desired state's schedule has whole minutes, so the
# run begins at a time that puts LEND_AT and RECLAIM_AT on whole minutes.
LEND_AT: Final = 30.0
RECLAIM_AT: Final = 90.0
LEND_AGAIN_AT: Final = 270.0
KILL_PREFILL_AT: Final = 108.0
NEW_PROMPTS_AT: Final = 125.0
KILL_DECODE_AT: Final = 172.0
NEW_OUTPUTS_AT: Final = 190.0
DEVICE_FAULT_AT: Final = 220.0
UPGRADE_AT: Final = 240.0

_LEAD_S: Final = 300  # the mesh begins to reclaim a group this long before the scheduled time
_PEAK_PER_S: Final = 7.0
NUM_INSTANCES: Final = 13  # nine in three groups, and four blank ones

_GROUPS: Final = """\
services:
  model:
    release: "{release}"
    options: {{sim_law: smollm2-cpu, sim_eos_period: 0}}
    role_options:
      prefill: {{num_slots: 4}}
      decode: {{num_slots: 4}}
scenarios:
  chat: {{service: model, ratio: auto, upgrade: {{soak_s: 4}}}}
groups:
  chat: {{scenario: chat, count: 3, prefill: 1, decode: 2}}
schedules:
  - {{at: "{lend}", scenario: chat, lend: 1}}
  - {{at: "{reclaim}", scenario: chat, reclaim: 1}}
  - {{at: "{lend_again}", scenario: chat, lend: 1}}
"""


def next_start(now: float) -> float:
    """When the run must begin (unix seconds), so that LEND_AT and RECLAIM_AT are whole minutes."""
    return math.ceil((now + LEND_AT) / 60) * 60 - LEND_AT


def groups(start: float, release: str) -> str:
    """The desired state, as YAML, of a run that begins at `start` (unix seconds)."""

    def cron(at_s: float) -> str:
        return time.strftime("%M %H * * *", time.gmtime(start + at_s))

    return _GROUPS.format(
        release=release,
        lend=cron(LEND_AT),
        reclaim=cron(RECLAIM_AT + _LEAD_S),
        lend_again=cron(LEND_AGAIN_AT),
    )


def rate(at_s: float) -> float:
    """Requests per second: few at night, peaks before noon and in the afternoon.

    The shape is that of P/D-Serve's figure 2a.
    """
    hour = 24 * at_s / LENGTH_S

    def hump(at: float, width: float) -> float:
        return math.exp(-(((hour - at) / width) ** 2))

    return _PEAK_PER_S * min(1.0, 0.25 + 0.75 * hump(11.0, 3.0) + 0.75 * hump(16.5, 2.8))


def lengths(at_s: float) -> Lengths:
    """The lengths of prompts and answers.

    At NEW_PROMPTS_AT, prompts become three times as long. At NEW_OUTPUTS_AT, they become short
    again, and answers become 3.5 times as long.
    """
    if at_s < NEW_PROMPTS_AT:
        return Lengths(300, 20)
    return Lengths(900, 20) if at_s < NEW_OUTPUTS_AT else Lengths(300, 70)


def arrivals(seed: int) -> Iterator[Arrival]:
    return poisson(random.Random(seed), LENGTH_S, _PEAK_PER_S, rate, lengths, SCENARIO)

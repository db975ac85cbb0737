"""Decides whether an engine schedules a step while it computes the one before (S139 to S150).

With asynchronous scheduling, the next step is ready when a step ends, so the device does not wait
for the CPU. In return, if an answer ends unforeseen (by a stop token or an abort), the engine
computes one more token and discards it. Pooling models schedule between their steps, whatever the
setting says. So does an engine where vLLM cannot schedule asynchronously, or where no test has
shown that it can. With AUTO, it also does so where asynchronous scheduling gains nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class AsyncScheduling(StrEnum):
    """The setting. AUTO: where it pays."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class Schedules:
    """The facts that decide. `hands_on_all`: the engine is a prefill, whose jobs draw one token."""

    device: str
    is_pooling: bool = False
    hands_on_all: bool = False
    proposes_tokens: bool = False
    reads_images: bool = False
    num_stages: int = 1  # of a pipeline


@dataclass(frozen=True, slots=True)
class Decision:
    is_async: bool
    reason: str


def decide(asked: AsyncScheduling, engine: Schedules) -> Decision:
    """Whether the engine schedules asynchronously, and why."""
    if asked is AsyncScheduling.OFF:
        return Decision(False, "the setting")
    if engine.is_pooling:
        return Decision(False, "an input of a pooling model takes one step")
    if engine.proposes_tokens:
        return Decision(False, "tokens are proposed from those of the step before")
    if engine.reads_images:
        return Decision(False, "no test has shown it with a model that reads images")
    if engine.num_stages > 1:
        return Decision(False, "a pipeline has a step for each of its stages under way")
    if asked is AsyncScheduling.ON:
        return Decision(True, "the setting")
    if engine.hands_on_all:
        return Decision(False, "a prefill draws one token per request")
    if engine.device == "cpu":
        return Decision(False, "on a CPU it gains nothing: a gap is a hundredth of a step")
    return Decision(True, "the device computes while the CPU schedules")

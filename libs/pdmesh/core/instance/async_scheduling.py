"""Decides whether an engine schedules a step while it computes the one before (S139 to S150).

With this asynchronous scheduling, the next step is ready when a step ends, so the device does not
wait for the CPU. But if an answer ends by a stop token or an abort, the engine has computed one
token too many, which it discards.

Even if the setting is ON, an engine schedules synchronously if its model is a pooling model or
reads images, if it proposes tokens, or if it has several pipeline stages. With AUTO, engines that
would gain nothing schedule synchronously as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class AsyncScheduling(StrEnum):
    """The setting. AUTO means asynchronous if that gains something."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class Schedules:
    """The facts that decide. `hands_on_all` is true for a prefill, which draws token 1 only."""

    device: str
    is_pooling: bool = False
    hands_on_all: bool = False
    proposes_tokens: bool = False
    reads_images: bool = False
    num_stages: int = 1  # pipeline stages


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

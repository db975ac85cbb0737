"""The whole state of a request's core, so that a test can compare it before and after an event."""

from __future__ import annotations

from pdmesh.core.request.early_decode import EarlyDecode
from pdmesh.core.request.leg_silence import LegSilence
from pdmesh.core.request.machine import Request
from pdmesh.core.request.plan_exclusions import PlanExclusions
from pdmesh.core.request.poison import Deaths
from pdmesh.core.request.resource_release import Holdings
from pdmesh.core.request.retry_budget import RetryBudget

_PARTS = (EarlyDecode, Holdings, LegSilence, PlanExclusions, Deaths, Request)


def state_of(value: object) -> object:
    """The state as plain values, without the flight recorder, which records every event."""
    if isinstance(value, _PARTS):
        return {n: state_of(getattr(value, n)) for n in value.__slots__ if n != "recorder"}
    if isinstance(value, RetryBudget):
        return value._balance
    return list(value) if isinstance(value, list | set | dict) else value

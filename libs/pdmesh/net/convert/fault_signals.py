"""Converts fault signals and vitals between protobuf messages and the core's types.

A fault signal is one sign of a fault. Vitals are the counters by which an instance is judged, as
each heartbeat reports them.
"""

from __future__ import annotations

from pdmesh.core.health.fault_judge import Signal
from pdmesh.core.health.fault_levels import level_of
from pdmesh.core.health.outlier_detection import Vitals
from pdmesh.events.v1.events_pb2 import FaultSignal, InstanceHealth


def signal_from(message: FaultSignal) -> Signal:
    level = level_of(message.level)
    return Signal(message.source, message.reason, level, message.is_proof, message.detail)


def signal_to(signal: Signal) -> FaultSignal:
    return FaultSignal(
        source=signal.source,
        reason=signal.reason,
        level=int(signal.level),
        is_proof=signal.is_proof,
        detail=signal.detail,
    )


def vitals_from(message: InstanceHealth.Vitals) -> Vitals:
    return Vitals(
        message.num_accepted,
        message.num_refused,
        message.num_ended,
        message.num_failed,
        message.num_pulls,
        message.pull_s,
        message.pull_bytes,
        message.num_slots_used,
        message.num_tokens,
    )


def vitals_to(vitals: Vitals) -> InstanceHealth.Vitals:
    return InstanceHealth.Vitals(
        num_accepted=vitals.num_accepted,
        num_refused=vitals.num_refused,
        num_ended=vitals.num_ended,
        num_failed=vitals.num_failed,
        num_pulls=vitals.num_pulls,
        pull_s=vitals.pull_s,
        pull_bytes=vitals.pull_bytes,
        num_slots_used=vitals.num_slots_used,
        num_tokens=vitals.num_tokens,
    )

"""Passes the state of a node's devices from the node's agent to its instances, in a file (S33).

The agent writes the file. Each instance turns it into signals, the evidence of faults, about its
own devices. A checksum covers all of the content, so a torn, foreign or half-written file is never
taken for a healthy status. A damaged or old file gives a signal at a level that ejects no instance.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Final

from pdmesh.core.health.fault_judge import Signal
from pdmesh.core.health.fault_levels import EJECTS_FROM, Level, level_of

DEVICE_UNKNOWN: Final = "DEVICE_UNKNOWN"
STATUS_TORN: Final = "NODE_STATUS_TORN"
STATUS_OLD: Final = "NODE_STATUS_OLD"
SOURCE: Final = "device"
VOID_AFTER_PERIODS: Final = 3


class TornStatus(Exception):
    """The text is not a complete status."""


@dataclass(frozen=True, slots=True)
class DeviceStatus:
    """`reason` is empty while the device has no fault."""

    device: str
    level: Level = Level.WELL
    reason: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """The devices are in order of name.

    `written_at` is in seconds since 1970. Wall clocks may be compared here, because writer and
    reader are on one machine.
    """

    node_id: str
    written_at: float
    period_s: float
    devices: tuple[DeviceStatus, ...]

    def is_old(self, wall_now: float) -> bool:
        return wall_now - self.written_at > VOID_AFTER_PERIODS * self.period_s


def merged(statuses: Iterable[DeviceStatus]) -> tuple[DeviceStatus, ...]:
    """The worst status of each device over several sources."""
    worst: dict[str, DeviceStatus] = {}
    for status in statuses:
        known = worst.get(status.device)
        if known is None or status.level > known.level:
            worst[status.device] = status
    return tuple(worst[device] for device in sorted(worst))


def signals_for(devices: Sequence[str], statuses: Iterable[DeviceStatus]) -> tuple[Signal, ...]:
    """Signals for an instance that uses these devices.

    A status at a level that ejects is a proof, because the driver or an operator gave it.
    """
    return tuple(
        Signal(SOURCE, s.reason, s.level, s.level >= EJECTS_FROM, f"device {s.device} {s.detail}")
        for s in statuses
        if s.level > Level.WELL and s.device in devices
    )


def signals_from_file(text: str, devices: Sequence[str], wall_now: float) -> tuple[Signal, ...]:
    """The signals that `signals_for` returns, read from the text of the node's file."""
    try:
        status = parse(text)
    except TornStatus:
        return (Signal(SOURCE, STATUS_TORN, Level.TRANSIENT),)
    if status.is_old(wall_now):
        return (Signal(SOURCE, STATUS_OLD, Level.TRANSIENT),)
    return signals_for(devices, status.devices)


def dump(status: NodeStatus) -> str:
    body = asdict(status)
    return json.dumps({"checksum": _checksum(body), "status": body}, indent=2) + "\n"


def parse(text: str) -> NodeStatus:
    """The status in a file's text. Raises TornStatus."""
    try:
        whole = json.loads(text)
        body = whole["status"]
        if whole["checksum"] != _checksum(body):
            raise TornStatus("the checksum does not match")
        devices = tuple(
            DeviceStatus(d["device"], level_of(d["level"]), d["reason"], d["detail"])
            for d in body["devices"]
        )
        return NodeStatus(body["node_id"], body["written_at"], body["period_s"], devices)
    except (ValueError, KeyError, TypeError) as exc:
        raise TornStatus("not a node's status") from exc


def _checksum(body: object) -> str:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()

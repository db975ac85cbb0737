"""`pdmesh events`: follows the mesh's events on NATS, and prints each as one readable line."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
from typing import Any, Final

from google.protobuf import json_format
from google.protobuf.message import Message as ProtoMessage

from pdmesh.cli.connect import connected
from pdmesh.errors import InvalidRequest
from pdmesh.events.v1 import events_pb2
from pdmesh.net.bus import Message
from pdmesh.net.events import decode_event

# The types of events, by the third and fourth token of their subjects.
KINDS: Final[dict[tuple[str, str], type[ProtoMessage]]] = {
    ("health", "instance"): events_pb2.InstanceHealth,
    ("health", "changed"): events_pb2.HealthChanged,
    ("health", "node"): events_pb2.NodeReported,
    ("health", "fault"): events_pb2.FaultReport,
    ("load", "instance"): events_pb2.InstanceLoad,
    ("kv", "blocks"): events_pb2.KvBlocks,
    ("group", "changed"): events_pb2.GroupChanged,
    ("kv", "pin"): events_pb2.PinChanged,
    ("group", "step"): events_pb2.GroupStep,
    ("group", "upgrade"): events_pb2.UpgradeStep,
    ("request", "finished"): events_pb2.RequestFinished,
    ("error", "reported"): events_pb2.ErrorReported,
    ("control", "leader"): events_pb2.LeaderChanged,
}


def run(options: argparse.Namespace) -> int:
    asyncio.run(_follow(options))
    return 0


async def _follow(options: argparse.Namespace) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, stopping.set)
    show = as_json if options.json else as_line
    broken: list[BrokenPipeError] = []

    async def on_event(message: Message) -> None:
        try:
            print(show(message), flush=True)
        except BrokenPipeError as exc:  # the reader of the output has gone
            broken.append(exc)
            stopping.set()

    async with connected(options) as bus:
        await bus.subscribe(options.pattern, on_event, on_gap=lambda: print("... events were lost"))
        await stopping.wait()
    if broken:
        raise broken[0]


def as_json(message: Message) -> str:
    """One JSON object with the subject, and the event in protobuf's JSON mapping."""
    return json.dumps({"subject": message.subject, "event": _decoded(message)})


def as_line(message: Message) -> str:
    """For example `12:00:01 health.changed decode-0  toHealth=dead cause=lease_expired`."""
    event = _decoded(message)
    header = event.pop("header", {}) if isinstance(event, dict) else {}
    time_of_day = str(header.get("occurredAt", ""))[11:19]
    tokens = message.subject.split(".")
    is_ours = message.subject.startswith("mesh.v1.") and len(tokens) > 4
    about = f"{'.'.join(tokens[2:4])} {'.'.join(tokens[4:])}" if is_ours else message.subject
    return f"{time_of_day:8} {about:32} {_fields(event)}".rstrip()


def _decoded(message: Message) -> Any:
    """The event as JSON data. An unknown event is decoded as far as possible."""
    kind = KINDS.get(tuple(message.subject.split(".")[2:4]))  # type: ignore[arg-type]  # any length
    if kind is None:
        return {"undecoded_bytes": len(message.data)}
    try:
        return json_format.MessageToDict(decode_event(message, kind))
    except InvalidRequest as exc:
        return {"malformed": exc.message}


def _fields(event: Any) -> str:
    return " ".join(f"{name}={_short(value)}" for name, value in event.items())


def _short(value: Any) -> str:
    """A short form of a value: of many block hashes, only their number."""
    if isinstance(value, list) and len(value) > 4:
        return f"[{len(value)}]"
    if isinstance(value, float):
        return f"{value:.4g}"
    return (
        json.dumps(value, separators=(",", ":")) if isinstance(value, list | dict) else str(value)
    )

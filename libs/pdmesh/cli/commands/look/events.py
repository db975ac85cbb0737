"""`pdmesh events`: follows the mesh's events on NATS, and prints each as one readable line."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
from typing import Any, Final

import yaml
from google.protobuf import json_format
from google.protobuf.message import Message as ProtoMessage

from pdmesh.cli.connect import connected
from pdmesh.cli.errors import CommandFailed
from pdmesh.core.suggestion import suggestion
from pdmesh.errors import InvalidRequest
from pdmesh.events.v1 import events_pb2
from pdmesh.net import subjects
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
    ("control", "audit"): events_pb2.AdminChange,
}


# Sent all the time, whether something happens or not.
_PERIODIC: Final = frozenset({("health", "instance"), ("health", "node"), ("load", "instance")})


def run(options: argparse.Namespace) -> int:
    asyncio.run(_follow(options))
    return 0


async def _follow(options: argparse.Namespace) -> None:
    patterns = _patterns(options)
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, stopping.set)
    show = _FORMS[options.output]
    is_hidden = _PERIODIC if not (options.periodic or options.pattern) else frozenset()
    broken: list[BrokenPipeError] = []

    async def on_event(message: Message) -> None:
        if _kind_of(message) in is_hidden:
            return
        try:
            print(show(message), flush=True)
        except BrokenPipeError as exc:  # the reader of the output has gone
            broken.append(exc)
            stopping.set()

    async with connected(options) as bus:
        for pattern in patterns:
            await bus.subscribe(pattern, on_event, on_gap=lambda: print("... events were lost"))
        await stopping.wait()
    if broken:
        raise broken[0]


def _patterns(options: argparse.Namespace) -> list[str]:
    """The NATS subjects to follow. Raises CommandFailed."""
    known = sorted({domain for domain, _ in KINDS})
    for domain in options.domain:
        if domain not in known:
            hint = suggestion(domain, known) or f"; there are {', '.join(known)}"
            raise CommandFailed(f"--domain: there is no {domain}{hint}", code=2)
    if options.domain:
        return [
            subjects.ALL.replace(">", f"{domain}.>") for domain in dict.fromkeys(options.domain)
        ]
    return [options.pattern or subjects.ALL]


def as_json(message: Message) -> str:
    """One JSON object with the subject, and the event in protobuf's JSON mapping."""
    return json.dumps({"subject": message.subject, "event": _decoded(message)})


def as_yaml(message: Message) -> str:
    """One YAML document with the content of `as_json`."""
    document = {"subject": message.subject, "event": _decoded(message)}
    text: str = yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
    return f"---\n{text.rstrip()}"


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
    kind = KINDS.get(_kind_of(message))  # type: ignore[arg-type]  # any length
    if kind is None:
        return {"undecoded_bytes": len(message.data)}
    try:
        return json_format.MessageToDict(decode_event(message, kind))
    except InvalidRequest as exc:
        return {"malformed": exc.message}


def _kind_of(message: Message) -> tuple[str, ...]:
    """Domain and message of its subject."""
    return tuple(message.subject.split(".")[2:4])


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


_FORMS: Final = {"text": as_line, "json": as_json, "yaml": as_yaml}

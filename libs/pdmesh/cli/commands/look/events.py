"""`pdmesh events`: follows the mesh's events on NATS, and prints each as one readable line."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
from typing import Any, Final

import yaml
from google.protobuf import json_format

from pdmesh.cli.connect import connected
from pdmesh.cli.errors import CommandFailed
from pdmesh.client.events import PERIODIC, decoded, kind_of, patterns
from pdmesh.errors import InvalidRequest
from pdmesh.net.bus import Message


def run(options: argparse.Namespace) -> int:
    asyncio.run(_follow(options))
    return 0


async def _follow(options: argparse.Namespace) -> None:
    followed = _patterns(options)
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, stopping.set)
    show = _FORMS[options.output]
    is_hidden = PERIODIC if not (options.periodic or options.pattern) else frozenset()
    broken: list[BrokenPipeError] = []

    async def on_event(message: Message) -> None:
        if kind_of(message.subject) in is_hidden:
            return
        try:
            print(show(message), flush=True)
        except BrokenPipeError as exc:  # the output's reader has ended
            broken.append(exc)
            stopping.set()

    async with connected(options) as bus:
        for pattern in followed:
            await bus.subscribe(pattern, on_event, on_gap=lambda: print("... events were lost"))
        await stopping.wait()
    if broken:
        raise broken[0]


def _patterns(options: argparse.Namespace) -> list[str]:
    """The NATS subjects to follow. Raises CommandFailed."""
    if options.pattern and not options.domain:
        return [options.pattern]
    try:
        return patterns(options.domain)
    except InvalidRequest as exc:
        raise CommandFailed(f"--domain: {exc.message}", code=2) from exc


def as_json(message: Message) -> str:
    """One JSON object with the subject, and the event in protobuf's JSON mapping."""
    return json.dumps({"subject": message.subject, "event": _decoded(message)})


def as_yaml(message: Message) -> str:
    """One YAML document with the content of `as_json`."""
    document = {"subject": message.subject, "event": _decoded(message)}
    text: str = yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
    return f"---\n{text.rstrip()}"


def as_line(message: Message) -> str:
    """A line, for example `12:00:01 health.changed decode-0  toHealth=dead cause=lease_expired`."""
    event = _decoded(message)
    header = event.pop("header", {}) if isinstance(event, dict) else {}
    time_of_day = str(header.get("occurredAt", ""))[11:19]
    tokens = message.subject.split(".")
    is_ours = message.subject.startswith("mesh.v1.") and len(tokens) > 4
    about = f"{'.'.join(tokens[2:4])} {'.'.join(tokens[4:])}" if is_ours else message.subject
    return f"{time_of_day:8} {about:32} {_fields(event)}".rstrip()


def _decoded(message: Message) -> Any:
    """The event as JSON data.

    For an unknown type of event, the data has the event's length. For a malformed event, it has the
    reason.
    """
    try:
        event = decoded(message)
    except InvalidRequest as exc:
        return {"malformed": exc.message}
    if event is None:
        return {"undecoded_bytes": len(message.data)}
    return json_format.MessageToDict(event)


def _fields(event: Any) -> str:
    return " ".join(f"{name}={_short(value)}" for name, value in event.items())


def _short(value: Any) -> str:
    """A short form of a value: a list of more than four items becomes its length."""
    if isinstance(value, list) and len(value) > 4:
        return f"[{len(value)}]"
    if isinstance(value, float):
        return f"{value:.4g}"
    return (
        json.dumps(value, separators=(",", ":")) if isinstance(value, list | dict) else str(value)
    )


_FORMS: Final = {"text": as_line, "json": as_json, "yaml": as_yaml}

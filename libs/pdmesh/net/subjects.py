"""All NATS subjects of the mesh's events: mesh.v1.<domain>.<message>.<id> (docs/events.md)."""

from __future__ import annotations

import re

_ID = re.compile(r"[a-z0-9-]+")

ALL = "mesh.v1.>"


def _subject(domain: str, message: str, about: str) -> str:
    if about != "*" and not _ID.fullmatch(about):
        raise ValueError(f"id {about!r} does not match [a-z0-9-]+")
    return f"mesh.v1.{domain}.{message}.{about}"


def health_instance(instance_id: str = "*") -> str:
    return _subject("health", "instance", instance_id)


def health_changed(instance_id: str = "*") -> str:
    return _subject("health", "changed", instance_id)


def instance_load(instance_id: str = "*") -> str:
    return _subject("load", "instance", instance_id)


def kv_blocks(instance_id: str = "*") -> str:
    return _subject("kv", "blocks", instance_id)


def kv_pin(pin_id: str = "*") -> str:
    return _subject("kv", "pin", pin_id)


def group_changed(group_id: str = "*") -> str:
    return _subject("group", "changed", group_id)


def group_step(group_id: str = "*") -> str:
    return _subject("group", "step", group_id)


def upgrade_step(scenario: str = "*") -> str:
    return _subject("group", "upgrade", scenario)


def request_finished(gateway_id: str = "*") -> str:
    return _subject("request", "finished", gateway_id)


def error_reported(publisher_id: str = "*") -> str:
    return _subject("error", "reported", publisher_id)


def leader_changed(leader_id: str = "*") -> str:
    return _subject("control", "leader", leader_id)


def admin_changed(master_id: str = "*") -> str:
    return _subject("control", "audit", master_id)


def node_reported(node_id: str = "*") -> str:
    return _subject("health", "node", node_id)


def fault_report(instance_id: str = "*") -> str:
    return _subject("health", "fault", instance_id)

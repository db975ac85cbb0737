"""Reports each change by an operator, as a line of the log and as an event on NATS.

The report says who made the change, and contains the state before and after it. The line is written
before the event, because an event may be lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import structlog
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct

from pdmesh.errors import MeshError, shortened
from pdmesh.events.v1.events_pb2 import AdminChange
from pdmesh.net import subjects
from pdmesh.net.events import EventPublisher
from pdmesh.services.master_scheduler.admin.callers import AdminCaller
from pdmesh.v1 import admin_service_pb2 as pb

log = structlog.get_logger(__name__)

_MAX_VALUES: Final = 100  # the most changed values in one report
_MAX_VALUE_BYTES: Final = 512

State = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Changed:
    """The answer to a call that changed something, with the facts about the change.

    `about` names the changed instance, pin, adapter or scenarios, or is `desired` or `key-file`. If
    `before` is empty, the named object did not exist before the change. If `after` is empty, it
    does not exist any more.
    """

    answer: Message
    about: str
    before: State
    after: State
    reason: str = ""
    author: str = ""


class AuditTrail:
    """Reports the changes that are made through one master, `master_id`."""

    def __init__(self, publisher: EventPublisher, master_id: str) -> None:
        self._publisher, self._master_id = publisher, master_id

    async def tell(self, caller: AdminCaller, action: str, changed: Changed) -> None:
        """Report a change. `action` is the name of the called method, or `KeyFile`."""
        facts: dict[str, Any] = {
            "who": caller.who,
            "shown_by": caller.shown_by,
            "role": str(caller.role or ""),
            "author": changed.author,
            "address": caller.address,
            "action": action,
            "about": changed.about,
            "reason": changed.reason,
        }
        log.info("admin.changed", **facts, before=dict(changed.before), after=dict(changed.after))
        event = AdminChange(**facts, before=_struct(changed.before), after=_struct(changed.after))
        try:
            await self._publisher.publish(subjects.admin_changed(self._master_id), event)
        except MeshError as exc:
            log.warning("admin.change_not_told", action=action, reason=exc.reason)


def state_of(message: Message | None, *left_out: str) -> State:
    """Convert a message to a state, but omit the fields `left_out`. None becomes an empty state."""
    if message is None:
        return {}
    found: dict[str, Any] = MessageToDict(message, preserving_proto_field_name=True)
    return {name: value for name, value in found.items() if name not in left_out}


def of_versions(
    numbers: tuple[int, int], changes: Sequence[pb.DesiredChange]
) -> tuple[State, State]:
    """The states before and after a new version. They have at most a hundred changed values."""
    told = changes[:_MAX_VALUES]
    more = {"num_not_told": len(changes) - len(told)} if len(changes) > len(told) else {}
    before = {c.path: shortened(c.before, _MAX_VALUE_BYTES) for c in told if c.before}
    after = {c.path: shortened(c.after, _MAX_VALUE_BYTES) for c in told if c.after}
    return (
        {"version": numbers[0], "values": before, **more},
        {"version": numbers[1], "values": after, **more},
    )


def _struct(state: State) -> Struct:
    return ParseDict(dict(state), Struct())

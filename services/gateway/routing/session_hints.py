"""Tells instances what happens next in a chat session, so that they evict its KV at the right time.

A client may name the session and its state in a request. When the call has ended, the instances
that served it get a hint. The state decides how they treat the KV blocks of prompt and answer:

- The session pauses while a tool runs: the blocks are evicted last, for a bounded time.
- The session goes on: the blocks are evicted like others.
- The session is done: the blocks are evicted first.

Instances limit the number of blocks that they keep for pauses, so that clients cannot fill their
memory. `core.kv.tiers.session_holds` decides which instances get a hint, and for which blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from pdmesh.core.kv.tiers.session_holds import PausedSessions, SessionState, held_blocks
from pdmesh.services.gateway.routing.fleet import FleetView
from pdmesh.services.gateway.routing.sessions import SessionPool
from pdmesh.services.gateway.text.prompt import Prompt
from pdmesh.telemetry import metrics, names
from pdmesh.v1.common_pb2 import (
    SESSION_STATE_DONE,
    SESSION_STATE_PAUSED_FOR_TOOL,
    SESSION_STATE_RESUMED,
    InstanceRecord,
)
from pdmesh.v1.common_pb2 import SessionState as SessionStateProto
from pdmesh.v1.instance_service_pb2 import Command, SessionHint

log = structlog.get_logger(__name__)

_hints = metrics.counter(names.SESSION_HINTS, "Answers whose client named the session's state")
_STATES: Final[dict[SessionState, SessionStateProto.ValueType]] = {
    SessionState.PAUSED_FOR_TOOL: SESSION_STATE_PAUSED_FOR_TOOL,
    SessionState.RESUMED: SESSION_STATE_RESUMED,
    SessionState.DONE: SESSION_STATE_DONE,
}


@dataclass(frozen=True, slots=True)
class ServedChoice:
    """A choice (one answer of a call) that was completed.

    `answer` holds all its tokens, and `instance_ids` the instances that served it last.
    """

    prompt: Prompt
    answer: Sequence[int]
    instance_ids: Sequence[str]


class SessionHints:
    """Sends the hints for all calls of a gateway.

    During a pause, blocks are evicted last for `hold_s` seconds. `ended` logs its errors and raises
    none, because a lost hint must not harm a call.
    """

    def __init__(
        self,
        fleet: FleetView,
        sessions: SessionPool,
        *,
        hold_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet, self._sessions, self._hold_s = fleet, sessions, hold_s
        self._clock = clock
        self._paused = PausedSessions(hold_s)  # the keys are `Prompt.chat_key`

    def ended(
        self, session: str, state: SessionState, prompt: Prompt, served: Sequence[ServedChoice]
    ) -> None:
        """Send the hints for a call that has ended, even if the call failed.

        `prompt` is one of the call's prompts. `served` has the completed choices in their order.
        """
        try:
            self._tell(session, state, prompt, served)
        except Exception:
            log.exception("session_hints.bug")

    def _tell(
        self, session: str, state: SessionState, prompt: Prompt, served: Sequence[ServedChoice]
    ) -> None:
        if served:
            _hints.add(1, {"state": state.value})
        key = prompt.chat_key(session)
        told: list[str] = []
        for instance_id in dict.fromkeys(i for choice in served for i in choice.instance_ids):
            record = self._hinted(instance_id)
            if record is not None:
                told.append(instance_id)
                self._send(record, key, state, prompt, _blocks(record, served))
        for instance_id in self._paused.ended(key, state, told, self._clock()):
            if (record := self._hinted(instance_id)) is not None:
                self._send(record, key, state, prompt, ())

    def _hinted(self, instance_id: str) -> InstanceRecord | None:
        record = self._fleet.instance(instance_id)
        return record if record is not None and record.takes_session_hints else None

    def _send(
        self,
        record: InstanceRecord,
        key: str,
        state: SessionState,
        prompt: Prompt,
        blocks: Iterable[bytes],
    ) -> None:
        hint = SessionHint(
            session=key,
            state=_STATES[state],
            block_hashes=blocks,
            tenant=prompt.tenant_key,
            hold_ms=round(self._hold_s * 1000),
        )
        self._sessions.hint(record, Command(session_hint=hint))


def _blocks(record: InstanceRecord, served: Sequence[ServedChoice]) -> list[bytes]:
    here = [choice for choice in served if record.instance_id in choice.instance_ids]
    return held_blocks(
        (choice.prompt.hashes(record) for choice in here),
        len(served),
        lambda: here[0].prompt.answer_hashes(record, here[0].answer),
    )

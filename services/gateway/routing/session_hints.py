"""Tells the instances that served a session's turn what the client does next.

The client names the session and its state with a request. When the answer has ended, the blocks of
prompt and answer are evicted last for a bounded time (a tool runs), like others (the session goes
on), or first (it is done). Instances bound what is held, so a client cannot fill them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import structlog

from pdmesh.core.kv.tiers.holds import MAX_SESSION_NAMES, SessionState
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


class SessionHints:
    """For all calls of a gateway. `hold_s`: for how long a pause holds blocks.

    It only gives hints: none of its errors reaches a call.
    """

    def __init__(self, fleet: FleetView, sessions: SessionPool, *, hold_s: float) -> None:
        self._fleet, self._sessions, self._hold_s = fleet, sessions, hold_s

    def answered(
        self,
        session: str,
        state: SessionState,
        prompt: Prompt,
        answer: Sequence[int],
        instance_ids: Sequence[str],
    ) -> None:
        """A choice ended well. `answer`: all its tokens; `instance_ids`: of its last legs."""
        try:
            self._tell(session, state, prompt, answer, instance_ids)
        except Exception:
            log.exception("session_hints.bug")

    def _tell(
        self,
        session: str,
        state: SessionState,
        prompt: Prompt,
        answer: Sequence[int],
        instance_ids: Sequence[str],
    ) -> None:
        _hints.add(1, {"state": state.value})
        for instance_id in dict.fromkeys(instance_ids):
            record = self._fleet.instance(instance_id)
            if record is not None and record.takes_session_hints:
                self._sessions.hint(record, self._hint(record, session, state, prompt, answer))

    def _hint(
        self,
        record: InstanceRecord,
        session: str,
        state: SessionState,
        prompt: Prompt,
        answer: Sequence[int],
    ) -> Command:
        blocks = [*prompt.hashes(record), *prompt.answer_hashes(record, answer)]
        hint = SessionHint(
            session=prompt.chat_key(session),
            state=_STATES[state],
            block_hashes=blocks[:MAX_SESSION_NAMES],
            cache_salt=prompt.root(record.model_fingerprint).hex(),
            hold_ms=round(self._hold_s * 1000),
        )
        return Command(session_hint=hint)

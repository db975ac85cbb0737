"""Decides which KV is protected while a session's client is away (S108): at which instances, and
which blocks.

An instance that is told of a pause evicts these blocks last; `session_holds.py` decides that there.
The next turn may run elsewhere. So instances that were told of a pause are remembered, and also
hear that the session goes on or is done. Another gateway does not know them: there the time ends
the holds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from pdmesh.core.kv.tiers.session_holds import MAX_SESSION_NAMES, SessionState

MAX_PAUSED: Final = 16_384  # sessions whose instances are remembered
MAX_TOLD: Final = 16  # instances of one session, the last ones


@dataclass(frozen=True, slots=True)
class _Pause:
    """Which instances were told that a session has paused."""

    instance_ids: tuple[str, ...]
    until: float  # then no instance holds anything


@dataclass(slots=True)
class PausedSessions:
    """`hold_s`: for how long a pause holds blocks. Times are in seconds of the caller's clock."""

    hold_s: float
    max_paused: int = MAX_PAUSED
    # By the session's key, the last pause last, which is the last to be over.
    _pauses: OrderedDict[str, _Pause] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._pauses)

    def ended(
        self, session: str, state: SessionState, told: Sequence[str], now: float
    ) -> Sequence[str]:
        """A call of the session has ended, and these instances are told of the session's state.

        Returns the others that must be told of it, without blocks.
        """
        has_paused = state is SessionState.PAUSED_FOR_TOOL
        if has_paused and not told:
            return ()
        before = [i for i in self._forget(session, now) if i not in told]
        if not has_paused:
            return before
        self._remember(session, (*before, *told), now)
        return ()

    def _remember(self, session: str, instance_ids: Sequence[str], now: float) -> None:
        self._pauses[session] = _Pause(tuple(instance_ids[-MAX_TOLD:]), now + self.hold_s)
        while self._pauses:
            first = next(iter(self._pauses.values()))
            if len(self._pauses) <= self.max_paused and first.until > now:
                break
            self._pauses.popitem(last=False)

    def _forget(self, session: str, now: float) -> tuple[str, ...]:
        """The instances that were told of the session's pause and may still hold its blocks."""
        pause = self._pauses.pop(session, None)
        return pause.instance_ids if pause is not None and pause.until > now else ()


def protected_blocks(
    prompts: Iterable[Sequence[bytes]], num_choices: int, answer: Callable[[], Sequence[bytes]]
) -> list[bytes]:
    """The blocks that an instance protects, by name: of several choices, only the prompts.

    The client goes on with at most one of their answers. `prompts`: the names of the prompts that
    the instance served; `num_choices`: of the call; `answer`: the names of the first one's answer.
    """
    blocks = dict.fromkeys(name for prompt in prompts for name in prompt)
    if num_choices == 1:
        blocks.update(dict.fromkeys(answer()))
    return list(blocks)[:MAX_SESSION_NAMES]

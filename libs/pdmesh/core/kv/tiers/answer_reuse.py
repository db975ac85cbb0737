"""Estimates the chance that the KV of an answer is used again, from how often chats continued.

A chat has continued if a later prompt begins with the chat's last prompt and answer. Such a prompt
contains the block name of the answer's last full block. If no prompt does so within ten minutes,
the chat counts as ended. It also counts as ended if the next prompt leaves out the reasoning in the
answer.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Final

HORIZON_S: Final = 600.0
MAX_ANSWERS: Final = 16384
MAX_SCOPES: Final = 256
_WEIGHT: Final = 0.05  # how much a newly known outcome changes the average
_FIRST: Final = 0.5  # the chance in a scope without known outcomes


class AnswerReuse:
    """Keeps one chance per scope.

    A scope is what chats have in common, such as the model and the kind of requests.

    Times are in seconds, on the caller's clock. While the outcomes of `max_answers` answers are
    unknown, further answers are not followed. So in a busy hour only some answers are followed, but
    the chance is still estimated correctly.
    """

    __slots__ = ("_awaited", "_chances", "_max_answers")

    def __init__(self, max_answers: int = MAX_ANSWERS) -> None:
        assert max_answers > 0
        self._max_answers = max_answers
        # By the name of an answer's last full block: the scope and the time. In order of time.
        self._awaited: dict[bytes, tuple[Hashable, float]] = {}
        self._chances: dict[Hashable, float] = {}

    def __len__(self) -> int:
        """The number of answers whose outcome is not known yet."""
        return len(self._awaited)

    def chance(self, scope: Hashable) -> float:
        """The chance that the KV of this scope's next answer is used again, from 0 to 1."""
        return self._chances.get(scope, _FIRST)

    def answered(self, scope: Hashable, name: bytes, now: float) -> None:
        """Record an answer of a chat. `name` is the name of the answer's last full block."""
        self._expire(now)
        if name not in self._awaited and len(self._awaited) < self._max_answers:
            self._awaited[name] = scope, now

    def prompted(self, names: Sequence[bytes]) -> None:
        """Record a prompt. Its full blocks have these names."""
        if self._awaited:
            for name in [name for name in names if name in self._awaited]:
                self._learn(self._awaited.pop(name)[0], 1.0)

    def _expire(self, now: float) -> None:
        while self._awaited:
            name, (scope, at) = next(iter(self._awaited.items()))
            if now < at + HORIZON_S:
                return
            del self._awaited[name]
            self._learn(scope, 0.0)

    def _learn(self, scope: Hashable, found: float) -> None:
        before = self._chances.pop(scope, _FIRST)
        self._chances[scope] = before + _WEIGHT * (found - before)
        if len(self._chances) > MAX_SCOPES:
            del self._chances[next(iter(self._chances))]

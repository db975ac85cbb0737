"""Predicts how likely the KV of a chat's answer is used again: how often chats like it continued.

A chat continued if a later prompt begins with its answer. Then the prompt has the name of the
answer's last full block. An answer that no prompt repeats within ten minutes counts as one whose
chat ended. So does an answer whose reasoning the next prompt leaves out.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Final

HORIZON_S: Final = 600.0
MAX_ANSWERS: Final = 16384
MAX_SCOPES: Final = 256
_WEIGHT: Final = 0.05  # of the newest answer whose outcome is known
_FIRST: Final = 0.5  # before anything is known of a scope


class AnswerReuse:
    """`scope` is what chats have in common: the model and the scenario, for example.

    Times are in seconds, on the caller's clock. While `max_answers` are undecided, no others are
    followed. So in a busy hour fewer answers are counted, but these count as at any other time.
    """

    __slots__ = ("_awaited", "_chances", "_max_answers")

    def __init__(self, max_answers: int = MAX_ANSWERS) -> None:
        assert max_answers > 0
        self._max_answers = max_answers
        # The scope and the time, by the name of the answer's last full block; in order of time.
        self._awaited: dict[bytes, tuple[Hashable, float]] = {}
        self._chances: dict[Hashable, float] = {}

    def __len__(self) -> int:
        """How many answers are undecided: whether their chats continue is not known yet."""
        return len(self._awaited)

    def chance(self, scope: Hashable) -> float:
        """How likely the next answer of this scope is used again: 0 to 1."""
        return self._chances.get(scope, _FIRST)

    def answered(self, scope: Hashable, name: bytes, now: float) -> None:
        """A chat has got an answer; `name` is that of the answer's last full block."""
        self._expire(now)
        if name not in self._awaited and len(self._awaited) < self._max_answers:
            self._awaited[name] = scope, now

    def prompted(self, names: Sequence[bytes]) -> None:
        """A prompt came with full blocks of these names."""
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

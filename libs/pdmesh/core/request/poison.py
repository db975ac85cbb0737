"""Decides which prompts are refused because instances died while computing them (F38).

A prompt that has killed two instances is refused for a while. Otherwise the client's own retries
would send it to two more instances. Prompts are identified by a digest. The death of an instance
ends many calls, and several of them may have the same prompt. So instances are counted, not calls.
At most `max_entries` prompts are remembered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

MAX_DEATHS: Final = 2  # if this many instances die with one request, the request is to blame

Victim = tuple[str, int]  # an instance that died, and its incarnation (one life of the instance)


class Deaths:
    """The instances that died while they had this request. Silent instances do not count.

    A prompt that kills an instance does so at once. If an instance dies after it has produced
    `num_innocent_tokens` for the request, the request is not the cause. Earlier deaths then do not
    count any more.
    """

    __slots__ = ("_num_emitted", "_num_innocent_tokens", "_victims")

    def __init__(self, num_innocent_tokens: int) -> None:
        self._num_innocent_tokens = num_innocent_tokens
        self._victims: dict[Victim, None] = {}
        self._num_emitted = 0  # the number of emitted tokens at the last death

    def __len__(self) -> int:
        return len(self._victims)

    def count(self, victim: Victim, num_of_leg: int, num_emitted: int) -> None:
        """Count the death of `victim`, which produced `num_of_leg` of the `num_emitted` tokens."""
        if num_of_leg >= self._num_innocent_tokens:
            self._victims.clear()
        else:
            self._victims[victim] = None
            self._num_emitted = num_emitted

    def witnessed(self, num_emitted: int) -> Sequence[Victim]:
        """The counted deaths, or none if another instance has produced a token since."""
        return () if num_emitted > self._num_emitted else tuple(self._victims)


@dataclass(slots=True)
class PoisonBook:
    max_deaths: int = MAX_DEATHS
    remember_s: float = 600.0
    max_entries: int = 1024
    _victims: dict[bytes, tuple[frozenset[Victim], float]] = field(
        default_factory=dict
    )  # oldest first

    def __len__(self) -> int:
        return len(self._victims)

    def add(self, digest: bytes, victims: Iterable[Victim], now: float) -> None:
        """Add instances that died with this prompt. Its request has got no token since."""
        known = self._get(digest, now)
        self._victims.pop(digest, None)
        self._victims[digest] = (known.union(victims), now + self.remember_s)
        while len(self._victims) > self.max_entries:
            del self._victims[next(iter(self._victims))]

    def clear(self, digest: bytes) -> None:
        """Forget the victims of a prompt that was answered. They died for another reason."""
        self._victims.pop(digest, None)

    def is_poison(self, digest: bytes, now: float) -> bool:
        return len(self._get(digest, now)) >= self.max_deaths

    def _get(self, digest: bytes, now: float) -> frozenset[Victim]:
        found = self._victims.get(digest)
        if found is None:
            return frozenset()
        if now >= found[1]:
            del self._victims[digest]
            return frozenset()
        return found[0]

"""Decides which deaths of instances count against a request, and which prompts are refused for them
(F38).

A prompt that killed two instances is refused for a while. Prompts are known by digest. Without this
rule, the client's own retries would send such a prompt to the next two instances. Instances are
counted, not calls: an instance that dies ends many calls at once, perhaps several with one prompt.
The number of prompts is bounded: the oldest one is forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

MAX_DEATHS: Final = 2  # of instances with one request; then the request is to blame

Victim = tuple[str, int]  # an instance that died, and its incarnation


class Deaths:
    """Instances that died while they had one request. An instance that is only silent did not die.

    A prompt that kills instances does so at once. If an instance dies after `num_innocent_tokens`,
    the request did not cause that, and earlier deaths do not count any more.
    """

    __slots__ = ("_num_emitted", "_num_innocent_tokens", "_victims")

    def __init__(self, num_innocent_tokens: int) -> None:
        self._num_innocent_tokens = num_innocent_tokens
        self._victims: dict[Victim, None] = {}
        self._num_emitted = 0  # the number of emitted tokens at the last death

    def __len__(self) -> int:
        return len(self._victims)

    def count(self, victim: Victim, num_of_leg: int, num_emitted: int) -> None:
        """`num_of_leg` of the `num_emitted` tokens came while the victim had the request."""
        if num_of_leg >= self._num_innocent_tokens:
            self._victims.clear()
        else:
            self._victims[victim] = None
            self._num_emitted = num_emitted

    def witnessed(self, num_emitted: int) -> Sequence[Victim]:
        """The counted deaths; none if the request got a token elsewhere since."""
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
        """The victims died with a request that has this prompt and has got no token since."""
        known = self._get(digest, now)
        self._victims.pop(digest, None)
        self._victims[digest] = (known.union(victims), now + self.remember_s)
        while len(self._victims) > self.max_entries:
            del self._victims[next(iter(self._victims))]

    def clear(self, digest: bytes) -> None:
        """The prompt was answered: earlier victims died of something else."""
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

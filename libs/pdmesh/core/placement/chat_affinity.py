"""Remembers which instances served a chat last, so that the next turn finds the chat's KV (S94).

A plan names the instances that may serve a request, best first. At first, the best instances of the
turn's plan are remembered. If another instance reports that it has taken the request, it replaces
the planned instance. The age and number of remembered chats are bounded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Final

TTL_S: Final = 600.0  # a chat is forgotten if its last turn is older than this
MAX_CHATS: Final = 100_000


@dataclass(frozen=True, slots=True)
class Turn:
    """The last turn of a chat, and the instances that serve it.

    `decode_id` is empty if one instance does both phases. `excluded` instances have failed for this
    turn.
    """

    request_id: str
    prefill_id: str
    decode_id: str = ""
    excluded: Collection[str] = ()

    @property
    def instance_ids(self) -> tuple[str, ...]:
        return (self.prefill_id, self.decode_id) if self.decode_id else (self.prefill_id,)

    def taken_by(self, instance_id: str, *, is_decode: bool) -> Turn:
        if instance_id in self.excluded:
            return self  # the report is older than the plan
        if is_decode and self.decode_id:
            return replace(self, decode_id=instance_id)
        return replace(self, prefill_id=instance_id)


@dataclass(slots=True)
class ChatAffinity:
    ttl_s: float = TTL_S
    max_chats: int = MAX_CHATS
    _chats: OrderedDict[str, tuple[float, Turn]] = field(default_factory=OrderedDict)
    _chat_of: dict[str, str] = field(default_factory=dict)  # by the id of a chat's last request

    def __len__(self) -> int:
        return len(self._chats)

    def get(self, chat_id: str, now: float) -> tuple[str, ...]:
        """The ids of the chat's instances, or none if the chat is unknown or too old."""
        found = self._chats.get(chat_id)
        if found is None:
            return ()
        if now - found[0] > self.ttl_s:
            self._forget(chat_id)
            return ()
        return found[1].instance_ids

    def put(self, chat_id: str, turn: Turn, now: float) -> None:
        if not chat_id:
            return
        self._forget(chat_id)
        self._chats[chat_id] = (now, turn)
        self._chat_of[turn.request_id] = chat_id
        while len(self._chats) > self.max_chats or self._is_oldest_over(now):
            self._forget(next(iter(self._chats)))

    def admitted(self, instance_id: str, request_ids: Iterable[str], *, is_decode: bool) -> None:
        """Note that the instance has taken these requests. Only a chat's last request counts."""
        for request_id in request_ids:
            chat_id = self._chat_of.get(request_id)
            if chat_id is not None:
                at, turn = self._chats[chat_id]
                self._chats[chat_id] = (at, turn.taken_by(instance_id, is_decode=is_decode))

    def _forget(self, chat_id: str) -> None:
        found = self._chats.pop(chat_id, None)
        if found is not None and self._chat_of.get(found[1].request_id) == chat_id:
            del self._chat_of[found[1].request_id]

    def _is_oldest_over(self, now: float) -> bool:
        oldest_at, _ = next(iter(self._chats.values()))
        return now - oldest_at > self.ttl_s

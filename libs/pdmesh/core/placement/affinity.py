"""Remembers which instances served a chat last, so that its next turn finds its KV (S94).

Bounded by age and number.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field


@dataclass(slots=True)
class ChatAffinity:
    ttl_s: float = 600.0
    max_chats: int = 100_000
    _chats: OrderedDict[str, tuple[float, tuple[str, ...]]] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._chats)

    def get(self, chat_id: str, now: float) -> tuple[str, ...]:
        """Instance ids; empty if the chat is unknown or was silent for too long."""
        found = self._chats.get(chat_id)
        if found is None:
            return ()
        if now - found[0] > self.ttl_s:
            del self._chats[chat_id]
            return ()
        return found[1]

    def put(self, chat_id: str, instance_ids: tuple[str, ...], now: float) -> None:
        if not chat_id:
            return
        self._chats[chat_id] = (now, instance_ids)
        self._chats.move_to_end(chat_id)
        while len(self._chats) > self.max_chats or self._is_oldest_over(now):
            self._chats.popitem(last=False)

    def _is_oldest_over(self, now: float) -> bool:
        oldest_at, _ = next(iter(self._chats.values()))
        return now - oldest_at > self.ttl_s

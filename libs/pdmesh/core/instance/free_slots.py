"""Decides whether a gateway offers a prompt to an instance, and how many of its waiting prompts the
instance may have room for.

An instance reports to each gateway how many slots are free. Other gateways take them, too, so the
number is no promise: only the instance's admission takes a prompt. The gateway trusts the number
only for a while, because an instance of an older release may never report another one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

TRUST_S: Final = 1.0  # after this time without news, prompts are offered to a full instance


@dataclass(slots=True)
class FreeSlots:
    """Times are in seconds of the caller's clock.

    If `has_slot` is false, waiters are called when there may be a slot: after an offered prompt was
    answered or given up, or as soon as a full instance reports one.
    """

    # It refused a leg for now. It will report when it has a slot, and has not done so yet.
    is_full: bool = False
    # Free slots by the instance's last report, less those that our prompts have taken since; None:
    # there was no report yet.
    num_free: int | None = None
    _told_at: float = 0.0
    _num_loads: int = 0  # how many reports have come
    # Prompts that it has not answered yet, by key, with `_num_loads` at the offer.
    _offered: dict[int, int] = field(default_factory=dict)

    def has_slot(self, now: float) -> bool:
        """Whether a prompt may find a slot beside those that were offered before."""
        if self.num_free is None or now - self._told_at > TRUST_S:
            return True
        return self.num_unoffered > 0

    @property
    def num_unoffered(self) -> int:
        """Slots that no prompt was offered for; 0 if the instance is full or never reported."""
        if self.num_free is None or self.is_full:
            return 0
        return max(0, self.num_free - len(self._offered))

    @property
    def num_offered(self) -> int:
        return len(self._offered)

    def offer(self, key: int) -> None:
        """A prompt is sent to the instance."""
        self._offered[key] = self._num_loads

    def answered(self, key: int, *, is_accepted: bool) -> bool:
        """The instance has answered a leg. Returns whether a slot may be left for a waiter.

        An accepted prompt is subtracted from `num_free`, unless a report has come since the offer:
        that report counts the prompt already. If it crossed the offer on its way, it does not, but
        the report that comes with the acceptance does.
        """
        if key not in self._offered:
            return False
        has_told = self._offered.pop(key) != self._num_loads
        if has_told or not is_accepted:
            return True
        if self.num_free:
            self.num_free -= 1
        return False

    def rejected(self, now: float, *, is_for_now: bool) -> None:
        """The instance has rejected a leg. `is_for_now`: it will report when it has a slot."""
        self.is_full = self.is_full or is_for_now
        self._told_at = now

    def given_up(self, key: int) -> bool:
        """A leg is left. Returns whether a slot may be left for a waiter."""
        return self._offered.pop(key, None) is not None

    def told(self, num_free: int, now: float) -> int:
        """The instance reports its free slots. Returns how many waiters may have room now.

        None has, unless more slots are free than before: the instance may have rejected prompts for
        other reasons. Each prompt without an answer counts as one slot taken; if it does not take
        the slot, its answer wakes a waiter.
        """
        self._num_loads += 1
        before, self.num_free, self._told_at = self.num_free or 0, num_free, now
        self.is_full = self.is_full and not num_free
        num_new = num_free - len(self._offered)
        return num_new if num_free > before and num_new > 0 else 0

    def broken(self) -> None:
        """The stream to the instance has broken: nothing is known, and no offer is out."""
        self.num_free, self.is_full = None, False
        self._offered.clear()

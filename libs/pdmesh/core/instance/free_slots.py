"""Decides whether a gateway offers a prompt to an instance, and when it tries waiting prompts.

An instance reports to each gateway how many of its slots are free. The number is no promise, since
other gateways take slots, too. Only the instance's admission decides. A gateway trusts a number
only for a while, because an instance of an older release may never report another one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

TRUST_S: Final = 1.0  # this long after the last report or rejection, prompts are offered again


@dataclass(slots=True)
class FreeSlots:
    """The free slots of one instance, as one gateway knows them.

    Times are in seconds of the caller's clock. If `has_slot` is false, the gateway's prompts wait.
    The gateway tries waiting prompts again after an offered prompt was rejected or given up, or
    when a report shows room for them.
    """

    # The instance refused a prompt because it was full, and has not reported a free slot since.
    is_full: bool = False
    # The free slots of the last report, without those that our prompts have taken since. None
    # before the first report.
    num_free: int | None = None
    _told_at: float = 0.0
    _num_loads: int = 0  # how many reports have come
    # Prompts that the instance has not answered yet, by key, with `_num_loads` at the offer.
    _offered: dict[int, int] = field(default_factory=dict)

    def has_slot(self, now: float) -> bool:
        """Whether one more prompt may find a slot, beside the prompts that were offered before."""
        if self.num_free is None or now - self._told_at > TRUST_S:
            return True
        return self.num_unoffered > 0

    @property
    def num_unoffered(self) -> int:
        """Free slots without an offered prompt. 0 if the instance is full or never reported."""
        if self.num_free is None or self.is_full:
            return 0
        return max(0, self.num_free - len(self._offered))

    @property
    def num_offered(self) -> int:
        return len(self._offered)

    def offer(self, key: int) -> None:
        """Record that a prompt is sent to the instance."""
        self._offered[key] = self._num_loads

    def answered(self, key: int, *, is_accepted: bool) -> bool:
        """Record the answer to an offer. Returns whether a slot may be left for a waiting prompt.

        An accepted prompt takes one of `num_free`, unless a report has come since the offer. Such a
        report usually counts the prompt already. A report that was sent before the prompt arrived
        does not count the prompt, but then another report comes together with the acceptance.
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
        """Record a rejection. `is_for_now` means that the instance will report a free slot."""
        self.is_full = self.is_full or is_for_now
        self._told_at = now

    def given_up(self, key: int) -> bool:
        """Record that an offer was given up. True if a slot may be left for a waiting prompt."""
        return self._offered.pop(key, None) is not None

    def told(self, num_free: int, now: float) -> int:
        """Record a report of free slots. Returns how many waiting prompts may have room now.

        Unless more slots are free than before, no prompt is tried, because the instance may have
        rejected prompts for other reasons. Each prompt that waits for its answer counts as a taken
        slot. If that prompt is rejected, the rejection makes the gateway try a waiting prompt.
        """
        self._num_loads += 1
        before, self.num_free, self._told_at = self.num_free or 0, num_free, now
        self.is_full = self.is_full and not num_free
        num_new = num_free - len(self._offered)
        return num_new if num_free > before and num_new > 0 else 0

    def broken(self) -> None:
        """Forget the reports and the offers, because the stream to the instance has broken."""
        self.num_free, self.is_full = None, False
        self._offered.clear()

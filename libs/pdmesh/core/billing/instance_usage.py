"""Counts the time of instances by account. Operators charge customers for this time (P/D-Serve 3.3;
S22).

The leading master keeps the counts, and `accounts.py` says what an account is, and which account is
charged for an instance. While one master leads, the caller's clock measures time. From one leader
to the next, the wall clock measures it. An account is then charged for the lower of the two numbers
of instances that the two leaders saw.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from pdmesh.core.billing.accounts import Account

MAX_ACCOUNTS: Final = 4096
MAX_GAP_S: Final = 600.0  # the most time to charge between two leaders: a wall clock may jump


@dataclass(frozen=True, slots=True)
class Used:
    """The time that an account has used so far, and how many instances it has now."""

    account: Account
    instance_s: float
    num_instances: int


@dataclass(slots=True)
class UsageBook:
    """The used time of all accounts.

    Call `look` after each change of the numbers of instances. The numbers are assumed to stay the
    same until the next call.
    """

    max_accounts: int = MAX_ACCOUNTS
    _seconds: dict[Account, float] = field(default_factory=dict)
    _nums: Counter[Account] = field(default_factory=Counter)
    _looked_at: float | None = None

    def look(self, nums: Mapping[Account, int], now: float) -> None:
        self._pass(self._nums, now)
        self._nums = Counter({account: num for account, num in nums.items() if num})
        for account in self._nums:
            self._seconds.setdefault(account, 0.0)
        self._fold()

    def resume(
        self, used: Iterable[Used], away_s: float, nums: Mapping[Account, int], now: float
    ) -> None:
        """Continue from the accounts that an earlier leader wrote `away_s` ago.

        `nums` holds the numbers of instances now. This call includes the first `look`.
        """
        before: Counter[Account] = Counter()
        for each in used:
            self._seconds[each.account] = each.instance_s
            before[each.account] = each.num_instances
        self._looked_at = now - min(max(0.0, away_s), MAX_GAP_S)
        self._pass(before & Counter(nums), now)
        self.look(nums, now)

    def used(self, now: float) -> list[Used]:
        """The time that each account has used until `now`. The call changes no state."""
        passed_s = self._passed_s(now)
        return [
            Used(account, seconds + self._nums[account] * passed_s, self._nums[account])
            for account, seconds in sorted(self._seconds.items())
        ]

    def check_invariants(self) -> None:
        assert self._nums.keys() <= self._seconds.keys()
        assert all(seconds >= 0 for seconds in self._seconds.values())
        assert len(self._seconds) <= max(self.max_accounts, len(self._nums) + 1)

    def _pass(self, nums: Mapping[Account, int], now: float) -> None:
        passed_s, self._looked_at = self._passed_s(now), now
        for account, num in nums.items():
            self._seconds[account] = self._seconds.get(account, 0.0) + num * passed_s

    def _passed_s(self, now: float) -> float:
        return 0.0 if self._looked_at is None else max(0.0, now - self._looked_at)

    def _fold(self) -> None:
        """Merge the accounts that have no instances now, if there are too many accounts.

        The first merge keeps service, scenario and pool. If that is not enough, the second keeps
        only the pool.
        """
        for merge in (_of_scenario, lambda account: Account("", "", "", account.pool)):
            if len(self._seconds) <= self.max_accounts:
                return
            folded: dict[Account, float] = {}
            for account, seconds in self._seconds.items():
                to = account if account in self._nums else merge(account)
                folded[to] = folded.get(to, 0.0) + seconds
            self._seconds = folded


def _of_scenario(account: Account) -> Account:
    return Account(account.service, account.scenario, "", account.pool)

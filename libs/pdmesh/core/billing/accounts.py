"""Decides which account is charged for an instance (P/D-Serve 3.3; S22).

A group is a set of instances that serve one scenario, a kind of requests. An instance is charged to
its group from its assignment to its release, including set-up and drain. When a group is lent to a
pool, its instances become blank, that is, without a role. The account of the group and the pool is
then charged for as many blank instances as the group has, or for all of them if there are fewer.
All other blank instances are charged to the pool `free`. So the sum of all accounts is the time of
the whole fleet.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

from pdmesh.core.groups.adjustments import Adjustments, valid
from pdmesh.core.groups.cluster_state import Observed
from pdmesh.core.groups.desired import Desired, Scenario
from pdmesh.core.model import Phase, Role
from pdmesh.core.moves.move import OFF_POOL

FREE_POOL: Final = "free"


@dataclass(frozen=True, slots=True, order=True)
class Account:
    """A group's account, or the account of the pool that has borrowed the group.

    If `pool` is empty, the instances are assigned to the group. If `group_id` is empty, the account
    is `FREE`, or the account to which `UsageBook` adds the time of accounts without instances.
    """

    service: str
    scenario: str
    group_id: str
    pool: str = ""


FREE: Final = Account("", "", "", FREE_POOL)


def accounts_of(observed: Observed, desired: Desired, adjustments: Adjustments) -> Counter[Account]:
    """How many instances each account has now."""
    nums: Counter[Account] = Counter()
    for instance_id, seen in observed.seen.items():
        given = observed.given.get(instance_id)
        if given is not None and given.incarnation == seen.incarnation:
            nums[_account(desired, given.role_spec.scenario, given.role_spec.group_id)] += 1
        elif seen.role is not Role.NONE:
            nums[_account(desired, seen.scenario, seen.group_id)] += 1
        elif seen.phase is Phase.BLANK:
            nums[FREE] += 1
    for group_id, adjustment in valid(desired, adjustments).items():
        group = desired.groups[group_id]
        is_lent = adjustment.pool not in ("", OFF_POOL)
        num = min(desired.num_instances(group), nums[FREE]) if is_lent else 0
        nums[_account(desired, group.scenario, group_id, adjustment.pool)] += num
        nums[FREE] -= num
    return +nums


def _account(desired: Desired, scenario: str, group_id: str, pool: str = "") -> Account:
    service = desired.scenarios.get(scenario, Scenario()).service
    return Account(service, scenario, group_id, pool)

"""Each instance counts for exactly one account, so the accounts add up to the fleet (S22)."""

from __future__ import annotations

import pytest

from pdmesh.core.billing.accounts import FREE, Account, accounts_of
from pdmesh.core.groups.adjustments import Adjustment, adjusted, num_lent
from pdmesh.desired_file import read
from tests.fakes.group_world import World

pytestmark = pytest.mark.req("S22")

FILE = """
services:
  assistant: {model: m}
scenarios:
  chat: {service: assistant}
groups:
  day: {scenario: chat, prefill: 2, decode: 2}
  night: {scenario: chat, prefill: 2, decode: 1}
"""
DAY, NIGHT = Account("assistant", "chat", "day"), Account("assistant", "chat", "night")


def test_an_instance_counts_for_its_group_while_assigned_and_for_a_pool_while_lent() -> None:
    desired = read(FILE)
    world = World(desired, num=8)
    assert accounts_of(world.observe(), desired, {}) == {FREE: 8}
    world.round()
    assert accounts_of(world.observe(), desired, {}) == {DAY: 4, NIGHT: 3, FREE: 1}
    world.settle()
    assert accounts_of(world.observe(), desired, {}) == {DAY: 4, NIGHT: 3, FREE: 1}

    lent = {"night": Adjustment(2, 1, (2, 1), "training")}
    world.desired, world.num_lent = adjusted(desired, lent), num_lent(desired, lent)
    world.round()  # the lent group's instances still drain, so its pool gets only the free instance
    training = Account("assistant", "chat", "night", "training")
    assert accounts_of(world.observe(), desired, lent) == {DAY: 4, NIGHT: 3, training: 1}
    world.settle()
    assert accounts_of(world.observe(), desired, lent) == {DAY: 4, training: 3, FREE: 1}
    removed = {"night": Adjustment(2, 1, (2, 1), "off")}
    assert accounts_of(world.observe(), desired, removed) == {DAY: 4, FREE: 4}

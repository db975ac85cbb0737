"""Events of groups and instances, for the state machines that test the group controller.

Each subclass checks other invariants.
"""

from __future__ import annotations

import random
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from pdmesh.core.groups.desired import Desired
from tests.fakes.group_world import World

ids = st.runner().flatmap(lambda machine: st.sampled_from(machine.instance_ids()))
states = st.runner().flatmap(lambda machine: st.sampled_from(machine.STATES))


class WorldMachine(RuleBasedStateMachine):
    """A subclass sets the number of instances and the desired states, and checks each round."""

    NUM: ClassVar[int]
    STATES: ClassVar[tuple[Desired, ...]]

    @classmethod
    def instance_ids(cls) -> list[str]:
        return [f"i-{i}" for i in range(cls.NUM)]

    @initialize(state=states)
    def begin(self, state: Desired) -> None:
        self.world = World(state, num=self.NUM)

    def round(self, num_written: int | None, seconds: float) -> None:
        """Run a round of the controller after `seconds`. Only the first `num_written` writes
        succeed.
        """
        raise NotImplementedError

    @rule()
    def elect(self) -> None:
        self.world.elect()

    @rule(state=states)
    def apply(self, state: Desired) -> None:
        self.world.apply(state)

    @rule()
    def lose_assignments(self) -> None:
        self.world.given.clear()

    @rule(instance_id=ids)
    def hear(self, instance_id: str) -> None:
        self.world.hear(instance_id)

    @rule(instance_id=ids, fails=st.sampled_from([False, False, False, True]))
    def work(self, instance_id: str, fails: bool) -> None:
        self.world.work(instance_id, fails=fails)

    @rule(instance_id=ids)
    def tell(self, instance_id: str) -> None:
        self.world.tell(instance_id)

    @rule(seed=st.integers(0, 1000), num=st.integers(1, 12))
    def pass_time(self, seed: int, num: int) -> None:
        """Let all instances work for a while in some order, with rounds in between."""
        order = random.Random(seed)
        for _ in range(num):
            self.round(None, 0.5)
            for instance_id in order.sample(
                sorted(self.world.processes), len(self.world.processes)
            ):
                for act in (self.world.hear, self.world.work, self.world.tell):
                    if order.random() < 0.8:
                        act(instance_id)

    @rule(instance_id=ids)
    def kill(self, instance_id: str) -> None:
        if instance_id in self.world.processes:
            self.world.kill(instance_id)

    @rule(instance_id=ids)
    def start(self, instance_id: str) -> None:
        """Start an instance again, even if the registry still has the record of its previous
        incarnation.
        """
        self.world.start(instance_id)

    @rule(instance_id=ids, is_on=st.booleans(), is_at_once=st.booleans())
    def take_out(self, instance_id: str, is_on: bool, is_at_once: bool) -> None:
        out = self.world.out_at_once if is_at_once else self.world.to_drain
        (out.add if is_on else out.discard)(instance_id)

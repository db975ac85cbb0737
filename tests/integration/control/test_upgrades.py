"""Upgrades a real mesh under load (S24). No request may fail, a canary must wait until an operator
promotes it, and the mesh must roll a bad revision back by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pdmesh.cli.commands.admin import groups_text
from pdmesh.events.v1.events_pb2 import RequestFinished
from pdmesh.launcher.mesh import Mesh
from pdmesh.net import subjects
from pdmesh.net.bus import Message
from pdmesh.net.events import decode_event
from pdmesh.net.nats.bus import NatsBus
from tests.support.sites.groups import asking, spec
from tests.support.sites.operator import CHANGE_S, Operator
from tests.support.waiting import until

UPGRADE_S = 4 * CHANGE_S  # the two groups are upgraded one after the other


def desired(*options: str) -> str:
    """A desired state with two groups, each with one prefill and one decode. Instances with other
    options cannot exchange KV with instances of these groups.
    """
    listed = "".join(f"      {option}\n" for option in options)
    return f"""
services:
  model:
    options:
      sim_num_layers: 2
{listed}
scenarios:
  default:
    service: model
    upgrade: {{soak_s: 2}}
groups:
  chat: {{count: 2, prefill: 1, decode: 1}}
"""


class Watcher(Operator):
    """An operator that also remembers which instances served requests together."""

    def __init__(self, bus: NatsBus) -> None:
        super().__init__(bus)
        self.pairs: set[tuple[str, str]] = set()

    async def listen(self) -> None:
        await super().listen()
        await self._bus.subscribe(subjects.request_finished(), self._on_finished)

    async def _on_finished(self, message: Message) -> None:
        event = decode_event(message, RequestFinished)
        self.pairs.add((event.prefill_id, event.decode_id))

    async def until_running(self, revisions: Callable[[set[str]], bool]) -> set[str]:
        """Wait until both groups serve, no upgrade is under way, and `revisions` accepts the set of
        all revisions in use.
        """
        found: set[str] = set()

        async def is_so() -> bool:
            nonlocal found
            states = await self.groups()
            found = {m.revision for group in states.groups for m in group.members}
            is_quiet = all(u.state == "went back" for u in states.upgrades)
            are_serving = [g.state for g in states.groups] == ["serving"] * 2
            return is_quiet and are_serving and revisions(found)

        await until(is_so, within_s=UPGRADE_S)
        return found

    async def until_told(self, step: str) -> None:
        await until(lambda: step in self.told(), within_s=UPGRADE_S)

    def told(self) -> list[str]:
        return [step.step for step in self.upgrades]


@pytest.mark.timeout(600)
@pytest.mark.req("S24")
@pytest.mark.fault("F11")
async def test_an_upgrade_under_load_fails_no_request_and_a_bad_one_goes_back(
    tmp_path: Path,
) -> None:
    file = tmp_path / "groups.yaml"
    file.write_text(good := desired())
    async with Mesh(spec(file, num_blank=6, num_masters=2), tmp_path / "mesh") as mesh:
        bus = await NatsBus.connect(mesh.nats_url, "test")
        operator = Watcher(bus)
        await operator.listen()
        first = await operator.until_running(lambda found: len(found) == 1)

        async with asking(mesh.http_url) as outcomes:
            await until(lambda: len(outcomes) > 10, within_s=CHANGE_S)

            good = desired("sim_token_bytes: 128")
            await operator.apply(good, canary_share=0.5)
            await operator.until_told("begun")
            await until(
                lambda: (
                    "canary-default" in {s.group_id for s in operator.steps if s.step == "complete"}
                ),
                within_s=CHANGE_S,
            )  # fmt: skip
            num_before = len(operator.pairs)
            await until(lambda: len(operator.pairs) > num_before, within_s=CHANGE_S)
            assert "changing" not in operator.told()
            assert (await operator.promote()).scenarios == ["default"]
            await operator.until_told("changing")
            # The other master must continue the upgrade.
            mesh.kill(operator.upgrades[-1].header.publisher_id)
            await operator.until_told("done")
            second = await operator.until_running(lambda found: len(found) == 1 and found != first)
            steps = [f"{s.step} {s.group_id}".strip() for s in operator.upgrades]
            assert steps == [
                "begun", "promoted canary-default", "changing chat-0", "proved chat-0",
                "changing chat-1", "proved chat-1", "done",
            ]  # fmt: skip
            assert len({s.epoch for s in operator.upgrades}) == 2

            operator.upgrades.clear()
            await operator.apply(desired("sim_token_bytes: 128", "sim_fail_every: 2"))
            await operator.until_told("went_back")
            assert await operator.until_running(lambda found: found == second)
            assert "requests failed" in operator.upgrades[-1].reason
            assert "proved" not in operator.told()

            operator.upgrades.clear()
            # The value is refused, because it is not a multiple of 8.
            await operator.apply(desired("sim_token_bytes: 7"))
            await operator.until_told("went_back")
            assert await operator.until_running(lambda found: found == second)
            assert "BAD_OPTION" in operator.upgrades[-1].reason
        assert [o for o in outcomes if not o.is_complete] == []

        states = await operator.groups()
        # After each bad version, the mesh stored the version before it once more.
        assert states.version == 6
        assert "upgrade of default was rolled back: version 5: chat-0" in groups_text(states)
        assert (await operator.apply(good)).version == 6  # this is the desired state already
        await bus.close()

"""The progress of a rollout, read from the groups' states, and how a command waits for its end."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from pdmesh.cli.commands import rollout as command
from pdmesh.cli.errors import CommandFailed
from pdmesh.cli.rollout_progress import rollout_of
from pdmesh.cli.view.progress import ProgressLine
from pdmesh.errors import Unavailable
from pdmesh.v1.admin_service_pb2 import GroupState, ListGroupStatesResponse, UpgradeState


def look(
    *groups: GroupState,
    version: int = 7,
    seen: int = 7,
    upgrades: Sequence[UpgradeState] = (),
    paused: str = "",
) -> ListGroupStatesResponse:
    return ListGroupStatesResponse(
        version=version, seen_version=seen, groups=groups, upgrades=upgrades, paused=paused
    )


SERVING = GroupState(group_id="chat-0", state="serving")
CHANGING = GroupState(group_id="chat-1", state="changing", detail="waits for 1 decode")


def upgrade(state: str, version: int = 7) -> UpgradeState:
    return UpgradeState(scenario="chat", version=version, state=state, detail="why")


def test_it_is_done_when_every_group_serves_and_no_upgrade_is_under_way() -> None:
    assert rollout_of(look(SERVING), 7).is_done
    assert rollout_of(look(), 7).is_done  # the file has no groups
    assert not rollout_of(look(SERVING, CHANGING), 7).is_done
    assert not rollout_of(look(SERVING, upgrades=[upgrade("changing")]), 7).is_done
    assert not rollout_of(look(SERVING, upgrades=[upgrade("watching", 6)]), 7).is_done


def test_groups_that_answer_an_earlier_version_say_nothing_about_this_one() -> None:
    """Right after a change, the groups still serve the earlier version."""
    assert not rollout_of(look(SERVING, seen=6), 7).is_done
    assert not rollout_of(look(SERVING, version=6, seen=6), 7).is_done


def test_what_it_waits_for_is_said() -> None:
    many = [GroupState(group_id=f"g-{i}", state="forming") for i in range(5)]
    assert rollout_of(look(SERVING, CHANGING), 7).text == (
        "1 of 2 groups are as desired; chat-1 changing (waits for 1 decode)"
    )
    assert rollout_of(look(*many), 7).text.endswith(
        "g-0 forming, g-1 forming, g-2 forming and 2 more"
    )
    assert rollout_of(look(SERVING, paused="NATS is away"), 7).text.endswith("NATS is away")


def test_a_canary_waits_for_an_operator_and_nobody_waits_for_it() -> None:
    seen = rollout_of(look(SERVING, upgrades=[upgrade("canary")]), 7)
    assert seen.is_done
    assert seen.text.endswith("upgrade of chat: canary (why)")


@pytest.mark.parametrize("state", ["going back", "went back", "stopped"])
def test_an_upgrade_that_failed_ends_the_wait(state: str) -> None:
    assert state in rollout_of(look(SERVING, upgrades=[upgrade(state)]), 7).failure
    later = look(SERVING, version=8, seen=8, upgrades=[upgrade(state)])
    assert rollout_of(later, 7).failure == (
        f"version 8 has replaced it; upgrade of chat: {state} (why)"
    )


def test_an_upgrade_that_went_back_earlier_does_not_count() -> None:
    assert rollout_of(look(SERVING, upgrades=[upgrade("went back", 5)]), 7).is_done


def test_a_leader_that_dies_in_the_meantime_does_not_end_the_wait(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks: list[ListGroupStatesResponse | Unavailable] = [
        look(CHANGING),
        look(CHANGING),
        Unavailable("no master leads"),
        look(SERVING),
    ]

    async def groups() -> ListGroupStatesResponse:
        found = looks.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(command, "leader_of", lambda _: SimpleNamespace(groups=groups))
    monkeypatch.setattr(command, "_PAUSE_S", 0.0)
    assert asyncio.run(command.wait(Namespace(timeout=60.0), 7)).is_done
    said = [line.partition(": ")[2] for line in capsys.readouterr().err.splitlines()]
    assert said == [
        "0 of 1 groups are as desired; chat-1 changing (waits for 1 decode)",
        "no master leads",
        "1 of 1 groups are as desired",
    ]


def test_a_rollout_that_never_ends_is_given_up_with_what_it_waits_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def groups() -> ListGroupStatesResponse:
        return look(CHANGING)

    monkeypatch.setattr(command, "leader_of", lambda _: SimpleNamespace(groups=groups))
    with pytest.raises(CommandFailed, match=r"not rolled out after 0\.2 s: 0 of 1 groups"):
        asyncio.run(command.wait(Namespace(timeout=0.2), 7))


def test_a_terminal_has_one_line_that_is_rewritten(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    line = ProgressLine()
    for text in ("one", "one", "two"):
        line.say(text)
    line.end()
    assert capsys.readouterr().err == "\r\x1b[Kone\r\x1b[Ktwo\r\x1b[K"

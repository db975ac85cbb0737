"""Decides whether the rollout of a desired state's version is done or has failed.

A rollout is done when all groups are as the version says. A canary is a group that gets the new
version first. While a canary waits for an operator, the rollout counts as done, because only the
operator can continue it. A rollout has failed if a newer version has replaced it, or if its upgrade
has stopped, is being rolled back, or was rolled back. Scripts depend on these rules, because the
exit status of `pdmesh rollout status` follows from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pdmesh.v1 import admin_service_pb2 as pb

_SERVING: Final = "serving"
_WENT_BACK: Final = "went back"
_BACK: Final = ("going back", _WENT_BACK, "stopped")
_CANARY: Final = "canary"  # only an operator can continue, so the rollout counts as done
_SHOWN: Final = 3  # most groups that are named in one line


@dataclass(frozen=True, slots=True)
class Rollout:
    """The state of a rollout. `failure` is the reason of a failure, or empty."""

    is_done: bool
    text: str
    failure: str = ""


def rollout_of(states: pb.ListGroupStatesResponse, version: int) -> Rollout:
    """The state of the rollout of `version`, according to one answer of the leader."""
    if states.version > version:
        return Rollout(False, "", f"version {states.version} has replaced it{_went_back(states)}")
    failed = [u for u in states.upgrades if u.version == version and u.state in _BACK]
    if failed:
        return Rollout(False, "", _upgrade_text(failed[0]))
    if states.paused:
        return Rollout(False, f"the leader makes no changes now: {states.paused}")
    if states.seen_version < version:
        return Rollout(False, "the leader has not read this version yet")
    others = [group for group in states.groups if group.state != _SERVING]
    num_serving = len(states.groups) - len(others)
    text = f"{num_serving} of {len(states.groups)} groups are as desired"
    waiting = [f"{group.group_id} {group.state}{_why(group.detail)}" for group in others]
    waiting += [_upgrade_text(u) for u in states.upgrades if u.state not in (_WENT_BACK, _CANARY)]
    if waiting:
        return Rollout(False, f"{text}; {_some(waiting)}")
    canaries = [_upgrade_text(each) for each in states.upgrades if each.state == _CANARY]
    return Rollout(True, "; ".join([text, *canaries]))


def _went_back(states: pb.ListGroupStatesResponse) -> str:
    back = next((u for u in states.upgrades if u.state in _BACK), None)
    return f"; {_upgrade_text(back)}" if back is not None else ""


def _upgrade_text(upgrade: pb.UpgradeState) -> str:
    return f"upgrade of {upgrade.scenario}: {upgrade.state}{_why(upgrade.detail)}"


def _why(detail: str) -> str:
    return f" ({detail})" if detail else ""


def _some(words: Sequence[str]) -> str:
    more = len(words) - _SHOWN
    return ", ".join(words[:_SHOWN]) + (f" and {more} more" if more > 0 else "")

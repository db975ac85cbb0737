"""Decides when a bad upgrade is rolled back, and which group goes back next (S24).

An upgrade gives one group after another a new revision. The revision is bad if a group cannot be
set up with it or is not complete in time, or if `revision_health` finds it worse than the old one.
Then all groups return to the old revision, one at a time. The previous desired state is restored as
a new version.
"""

from __future__ import annotations

from dataclasses import replace

from pdmesh.core.groups.revisions import Upgrade
from pdmesh.core.upgrade.disruption import why_no_room, why_not_now
from pdmesh.core.upgrade.events import GroupSeen, RestoreVersion
from pdmesh.core.upgrade.revision_health import why_too_many
from pdmesh.core.upgrade.round import UpgradeRound
from pdmesh.core.upgrade.trial import Trial


def why_bad(
    round_: UpgradeRound, upgrade: Upgrade, seen: GroupSeen, trial: Trial, *, can_wait: bool
) -> str:
    """Why the group's new revision must be rolled back, or empty if no fault is known so far.

    With `can_wait`, the group may take any time to become complete.
    """
    limits, now = round_.limits, round_.now
    trial.note(seen, now)
    if seen.failure:
        return f"{seen.group_id}: {seen.failure}"
    if why := why_too_many(trial.incidents):
        return f"{seen.group_id}: {why}"
    waited_s = now - trial.unwhole_since if trial.unwhole_since is not None else 0.0
    if waited_s > limits.group_timeout_s and not can_wait:
        return f"{seen.group_id} was not whole in {limits.group_timeout_s:g} s: {seen.detail}"
    settled = round_.revision(upgrade.settled)
    controls = [(g.group_id, settled) for g in round_.groups if g.revision == settled]
    before = (seen.group_id, settled)
    bad = round_.trials.why_slow_or_failing(trial, controls, before, limits, now)
    return f"{seen.group_id}: {bad}" if bad else ""


def turn_back(round_: UpgradeRound, upgrade: Upgrade, reason: str) -> Upgrade:
    back = f"version {upgrade.version}: {reason}"
    after = replace(upgrade, back=back, canary_share=0.0)
    round_.announce("turned_back", after, upgrade.current, reason)
    if upgrade.current:
        after = after.moved(upgrade.current)
    return go_back(round_, after)


def go_back(round_: UpgradeRound, upgrade: Upgrade) -> Upgrade:
    """Do the next step of a rollback."""
    why_stopped = _restore(round_, upgrade)
    if upgrade.current:
        upgrade = upgrade.moved(upgrade.current)
        seen = round_.observed.groups[upgrade.current]
        if not _is_back(round_, upgrade, seen):
            state = f" ({seen.detail})" if seen.detail else ""
            way_out = "; apply a file that changes this group" if seen.failure else ""
            round_.say(upgrade, "going back", f"{seen.group_id}{state}{way_out}: {upgrade.back}")
            return upgrade
        round_.announce("back", upgrade, seen.group_id, round_.not_whole().lstrip("; "))
        upgrade = replace(upgrade, current="")
    return _next_back(round_, upgrade, why_stopped)


def _is_back(round_: UpgradeRound, upgrade: Upgrade, seen: GroupSeen) -> bool:
    """Whether the group is complete with the old revision again.

    A group that has lacked instances for too long counts as complete, so that the other groups do
    not wait for it.
    """
    if seen.revision != round_.revision(upgrade.settled):
        return False
    trial = round_.trial(seen.group_id, upgrade.settled)
    trial.note(seen, round_.now)
    since = trial.lacking_since
    patience_s = round_.limits.group_timeout_s
    return seen.is_whole or (since is not None and round_.now - since > patience_s)


def _next_back(round_: UpgradeRound, upgrade: Upgrade, why_stopped: str) -> Upgrade:
    left = [g for g in round_.groups if upgrade.service_of(g.group_id) != upgrade.settled]
    for group in left:
        if not group.serves:
            upgrade = upgrade.moved(group.group_id)
    serving = sorted((g for g in left if g.serves), key=lambda g: g.is_whole)
    if serving:
        if why := _why_not_back(round_, left, serving[0]):
            detail = f"{serving[0].group_id}: {why}{why_stopped}; {upgrade.back}"
            round_.say(upgrade, "going back", detail)
            return upgrade
        return round_.change(upgrade, serving[0])
    if upgrade.target != upgrade.settled:
        round_.say(upgrade, "stopped", f"{upgrade.back}{why_stopped}")
        return upgrade
    round_.announce("went_back", upgrade, reason=upgrade.back)
    round_.say(upgrade, "went back", upgrade.back)
    return replace(
        upgrade,
        changed={},
        back="",
        outcome=upgrade.back,
        settled_version=round_.observed.version,
    )


def _why_not_back(round_: UpgradeRound, left: list[GroupSeen], group: GroupSeen) -> str:
    """Why the group must wait, or empty if it may go back now."""
    # Do not wait until these groups are complete. The bad revision or a lack of instances may
    # prevent that.
    bad = {g.group_id for g in left} | {g.group_id for g in round_.groups if g.is_lacking}
    moving = round_.observed.planning - round_.observed.gathering
    why = why_not_now(round_, bad, moving)
    if not why and (no_room := why_no_room(round_, group)):
        file = f"a file without {group.group_id}"
        return f"{no_room}; if an outage is acceptable, apply {file} for a moment"
    return why


def _restore(round_: UpgradeRound, upgrade: Upgrade) -> str:
    """Restore the previous version of the desired state, if that is possible.

    If not, returns a text that tells the operator what to do.
    """
    if upgrade.target == upgrade.settled:
        return ""
    number, before = upgrade.version, upgrade.settled_version
    if round_.observed.version != number or before != number - 1:
        return "; later versions have changed more: apply a correct file"
    if before in round_.observed.lost_versions:
        return f"; version {before} is not kept any more: apply a correct file"
    round_.effects.append(RestoreVersion(before, number, upgrade.back))
    return ""

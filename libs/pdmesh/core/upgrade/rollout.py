"""Decides the next step of one scenario's upgrade, and why its groups must wait (S24).

A scenario is a kind of requests with its own groups of instances. In an upgrade, one of these
groups after another gets the new service. The next group begins when the one before has been
complete and healthy for a while. If the upgrade has a canary, an extra group gets the service
first, with a share of the requests, until an operator promotes the upgrade.
"""

from __future__ import annotations

from dataclasses import replace

from pdmesh.core.groups.desired import Service
from pdmesh.core.groups.revisions import Upgrade, canary_of
from pdmesh.core.upgrade.disruption import why_no_room, why_not_now
from pdmesh.core.upgrade.events import GroupSeen
from pdmesh.core.upgrade.rollback import go_back, turn_back, why_bad
from pdmesh.core.upgrade.round import UpgradeRound


def decide(round_: UpgradeRound, before: Upgrade | None) -> Upgrade:
    """The upgrade of the scenario after this round."""
    target, version = round_.observed.targets[round_.scenario], round_.observed.version
    if before is None:
        return Upgrade(round_.scenario, target, version, target, version)
    upgrade = _noted(round_, _without_gone(round_, before))
    if target != upgrade.target:
        upgrade = _retargeted(round_, upgrade, target)
    if upgrade.is_idle:
        if upgrade.outcome:
            round_.say(upgrade, "went back", upgrade.outcome + round_.not_whole())
        return replace(upgrade, settled_version=version)
    if upgrade.back:
        return go_back(round_, upgrade)
    if upgrade.canary_share:
        return _try_out(round_, upgrade)
    return _go_on(round_, upgrade)


def _without_gone(round_: UpgradeRound, upgrade: Upgrade) -> Upgrade:
    """Forget groups that are lent or removed.

    If such a group returns, it gets the settled service, to which a rollback also returns.
    """
    here = {g.group_id for g in round_.groups}
    changed = {g: s for g, s in upgrade.changed.items() if g in here}
    current = upgrade.current if upgrade.current in here else ""
    return replace(upgrade, changed=changed, current=current)


def _noted(round_: UpgradeRound, upgrade: Upgrade) -> Upgrade:
    """Note in `is_proved` whether a complete group serves with the settled service.

    After that, a rollback returns to this service, even if all groups are lost for a while.
    """
    settled = round_.revision(upgrade.settled)
    is_proved = any(g.is_whole and g.revision == settled for g in round_.groups)
    return replace(upgrade, is_proved=upgrade.is_proved or is_proved)


def _retargeted(round_: UpgradeRound, upgrade: Upgrade, target: Service) -> Upgrade:
    """The upgrade after the desired state has changed to another service, `target`."""
    version = round_.observed.version
    after = replace(upgrade, target=target, version=version, canary_share=0.0)
    if target == upgrade.settled:
        back = upgrade.back or f"version {version} asks for the previous revision"
        return replace(after, back=back)
    after = replace(after, back="", outcome="")
    if not upgrade.is_proved and not any(g.serves for g in round_.groups):
        return Upgrade(round_.scenario, target, version, target, version)
    if upgrade.current:  # this group has been taken out already
        after = after.moved(upgrade.current)
    else:
        share = 0.0 if upgrade.changed else round_.observed.canary_share
        after = replace(after, canary_share=share)
    round_.trials.forget(round_.scenario)
    round_.announce("begun", after)
    return after


def _try_out(round_: UpgradeRound, upgrade: Upgrade) -> Upgrade:
    """Judge the canary, which gets its share of the requests until an operator ends the trial."""
    canary = canary_of(round_.scenario)
    seen, trial = round_.observed.groups.get(canary), round_.trial(canary, upgrade.target)
    share = f"{upgrade.canary_share:.1%} of the requests"
    if seen is None or seen.revision != round_.revision(upgrade.target):
        round_.say(upgrade, "canary", f"is set up for {share}")
        return upgrade
    if bad := why_bad(round_, upgrade, seen, trial, can_wait=True):
        return turn_back(round_, upgrade, bad)
    state = f"serves {share}; pdmesh promote, or pdmesh rollback" if seen.is_whole else seen.detail
    round_.say(upgrade, "canary", state)
    return upgrade


def _go_on(round_: UpgradeRound, upgrade: Upgrade) -> Upgrade:
    if upgrade.current:
        upgrade = _try_current(round_, upgrade)
        if upgrade.current or upgrade.back:
            return upgrade
    left = [g for g in round_.groups if upgrade.service_of(g.group_id) != upgrade.target]
    serving = sorted((g for g in left if g.serves), key=lambda g: not g.failure)
    if not serving:
        if upgrade.target not in upgrade.changed.values():
            return _begin_unserved(round_, upgrade, left)
        for group in left:  # these groups do not serve, so all may change at once
            upgrade = upgrade.moved(group.group_id)
        return _done(round_, upgrade)
    group = serving[0]  # a group whose set-up fails comes first, as its revision may be the cause
    hopeless = {g.group_id for g in serving if g.failure}
    why = why_not_now(round_, hopeless, round_.observed.planning) or why_no_room(round_, group)
    if why:
        round_.say(upgrade, "waiting", f"{group.group_id}: {why}")
        return upgrade
    return round_.change(upgrade, group)


def _begin_unserved(round_: UpgradeRound, upgrade: Upgrade, left: list[GroupSeen]) -> Upgrade:
    """Begin with one group although no group serves now.

    No group runs the target service yet, so one group must prove it first, even in an outage.
    """
    if not left:
        round_.say(upgrade, "waiting", "all of its groups are lent or not set up yet")
        return upgrade
    if round_.is_taken:
        round_.say(upgrade, "waiting", "a group of another scenario is being changed")
        return upgrade
    return round_.change(upgrade, left[0])


def _try_current(round_: UpgradeRound, upgrade: Upgrade) -> Upgrade:
    seen = round_.observed.groups[upgrade.current]
    trial = round_.trial(upgrade.current, upgrade.target)
    if seen.revision != round_.revision(upgrade.target):
        round_.say(upgrade, "changing", seen.group_id)
        return upgrade
    if bad := why_bad(round_, upgrade, seen, trial, can_wait=False):
        return turn_back(round_, upgrade, bad)
    soak_s = round_.limits.soak_s
    if trial.whole_since is None:
        round_.say(upgrade, "changing", f"{seen.group_id}: {seen.detail}".rstrip(": "))
        return upgrade
    tried_s = round_.now - trial.whole_since
    if tried_s < soak_s:
        round_.say(upgrade, "watching", f"{seen.group_id}: {tried_s:.0f} of {soak_s:g} s")
        return upgrade
    round_.announce("proved", upgrade, seen.group_id)
    return replace(upgrade, current="")


def _done(round_: UpgradeRound, upgrade: Upgrade) -> Upgrade:
    round_.announce("done", upgrade)
    target, version = upgrade.target, round_.observed.version
    return Upgrade(round_.scenario, target, version, target, upgrade.version, is_proved=True)

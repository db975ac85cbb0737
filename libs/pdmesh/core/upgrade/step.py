"""Decides what the groups of one scenario run next in an upgrade, and why not yet (S24)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Final

from pdmesh.core.groups.desired import Service, revision_of
from pdmesh.core.groups.revisions import Upgrade, canary_of
from pdmesh.core.model import Role
from pdmesh.core.upgrade.events import (
    Effect,
    GroupSeen,
    Looked,
    RestoreVersion,
    Told,
    UpgradeReport,
)
from pdmesh.core.upgrade.trial import Watch, Watches

MAX_BUSY: Final = 0.85  # of what is left while a group is out
_MAX_INCIDENTS: Final = 1  # so many lost or unwell instances may be chance


@dataclass(slots=True)
class Turn:
    """One look at one scenario."""

    kv_transport: str
    watches: Watches
    look: Looked
    scenario: str
    before: Upgrade | None
    is_taken: bool  # a group of another scenario is under way
    now: float
    report: UpgradeReport | None = None
    told: list[Effect] = field(default_factory=list)

    def decide(self) -> tuple[Upgrade, list[Effect]]:
        target = self.look.targets[self.scenario]
        version = self.look.version
        if self.before is None:
            return Upgrade(self.scenario, target, version, target, version), []
        upgrade = self._noted(self._without_gone(self.before))
        if target != upgrade.target:
            upgrade = self._retargeted(upgrade, target)
        if upgrade.is_idle:
            if upgrade.outcome:
                self._say(upgrade, "went back", upgrade.outcome + self._not_whole())
            return replace(upgrade, settled_version=version), self.told
        if upgrade.back:
            upgrade = self._go_back(upgrade)
        elif upgrade.canary_share:
            upgrade = self._try_out(upgrade)
        else:
            upgrade = self._go_on(upgrade)
        return upgrade, self.told

    def _without_gone(self, upgrade: Upgrade) -> Upgrade:
        """Forget groups that are lent or removed: if they come back, they run what is settled."""
        here = {g.group_id for g in self._groups()}
        changed = {g: s for g, s in upgrade.changed.items() if g in here}
        current = upgrade.current if upgrade.current in here else ""
        return replace(upgrade, changed=changed, current=current)

    def _noted(self, upgrade: Upgrade) -> Upgrade:
        """Note whether a complete group serves with what is settled.

        From then on the groups go back to that, even if all of them are lost for a while.
        """
        settled = self._revision(upgrade.settled)
        is_proved = any(g.is_whole and g.revision == settled for g in self._groups())
        return replace(upgrade, is_proved=upgrade.is_proved or is_proved)

    def _retargeted(self, upgrade: Upgrade, target: Service) -> Upgrade:
        """The desired state asks for something else than before."""
        version = self.look.version
        after = replace(upgrade, target=target, version=version, canary_share=0.0)
        if target == upgrade.settled:
            back = upgrade.back or f"version {version} asks for what was before"
            return replace(after, back=back)
        after = replace(after, back="", outcome="")
        if not upgrade.is_proved and not any(g.serves for g in self._groups()):
            return Upgrade(self.scenario, target, version, target, version)
        if upgrade.current:  # it has been taken out already
            return self._begun(after.moved(upgrade.current))
        share = 0.0 if upgrade.changed else self.look.canary_share
        return self._begun(replace(after, canary_share=share))

    def _begun(self, upgrade: Upgrade) -> Upgrade:
        self.watches.forget(self.scenario)
        self._tell("begun", upgrade)
        return upgrade

    # --- forward ---------------------------------------------------------------------------------

    def _try_out(self, upgrade: Upgrade) -> Upgrade:
        """The canary serves its share until an operator promotes it or rolls it back."""
        canary = canary_of(self.scenario)
        seen, watch = self.look.groups.get(canary), self._watch(canary, upgrade.target)
        share = f"{upgrade.canary_share:.1%} of the requests"
        if seen is None or seen.revision != self._revision(upgrade.target):
            self._say(upgrade, "canary", f"is set up for {share}")
            return upgrade
        if bad := self._why_bad(upgrade, seen, watch, can_wait=True):
            return self._turned_back(upgrade, bad)
        state = (
            f"serves {share}; pdmesh promote, or pdmesh rollback" if seen.is_whole else seen.detail
        )
        self._say(upgrade, "canary", state)
        return upgrade

    def _go_on(self, upgrade: Upgrade) -> Upgrade:
        if upgrade.current:
            upgrade = self._watch_current(upgrade)
            if upgrade.current or upgrade.back:
                return upgrade
        left = [g for g in self._groups() if upgrade.service_of(g.group_id) != upgrade.target]
        serving = sorted((g for g in left if g.serves), key=lambda g: not g.failure)
        if not serving:
            if upgrade.target not in upgrade.changed.values():
                return self._begin_unserved(upgrade, left)
            for group in left:  # they serve nothing, so all may change at once
                upgrade = upgrade.moved(group.group_id)
            return self._done(upgrade)
        group = serving[0]  # first one that cannot be set up again: its revision may be the cause
        hopeless = {g.group_id for g in serving if g.failure}
        if why := self._why_not_now(hopeless, self.look.planning) or self._why_no_room(group):
            self._say(upgrade, "waiting", f"{group.group_id}: {why}")
            return upgrade
        return self._change(upgrade, group)

    def _begin_unserved(self, upgrade: Upgrade, left: list[GroupSeen]) -> Upgrade:
        """No group serves now, and the target has not proved itself.

        So one group begins: an outage of all groups must not make the target what they go back to.
        """
        if not left:
            self._say(upgrade, "waiting", "all its groups are lent or not there yet")
            return upgrade
        if self.is_taken:
            self._say(upgrade, "waiting", "a group of another scenario is being changed")
            return upgrade
        return self._change(upgrade, left[0])

    def _watch_current(self, upgrade: Upgrade) -> Upgrade:
        seen, watch = (
            self.look.groups[upgrade.current],
            self._watch(upgrade.current, upgrade.target),
        )
        if seen.revision != self._revision(upgrade.target):
            self._say(upgrade, "changing", seen.group_id)
            return upgrade
        if bad := self._why_bad(upgrade, seen, watch, can_wait=False):
            return self._turned_back(upgrade, bad)
        soak_s = self.look.limits_of(self.scenario).soak_s
        if watch.whole_since is None:
            self._say(upgrade, "changing", f"{seen.group_id}: {seen.detail}".rstrip(": "))
            return upgrade
        watched_s = self.now - watch.whole_since
        if watched_s < soak_s:
            self._say(upgrade, "watching", f"{seen.group_id}: {watched_s:.0f} of {soak_s:g} s")
            return upgrade
        self._tell("proved", upgrade, seen.group_id)
        return replace(upgrade, current="")

    def _why_bad(self, upgrade: Upgrade, seen: GroupSeen, watch: Watch, *, can_wait: bool) -> str:
        """Why the group's new revision must not stay; empty: nothing speaks against it so far."""
        limits = self.look.limits_of(self.scenario)
        watch.note(seen, self.now)
        if seen.failure:
            return f"{seen.group_id}: {seen.failure}"
        if len(watch.incidents) > _MAX_INCIDENTS:
            named = ", ".join(f"{i}: {why}" for i, why in sorted(watch.incidents.items()))
            return f"{seen.group_id}: {named}"
        waited_s = self.now - watch.unwhole_since if watch.unwhole_since is not None else 0.0
        if waited_s > limits.group_timeout_s and not can_wait:
            return f"{seen.group_id} was not whole in {limits.group_timeout_s:g} s: {seen.detail}"
        settled = self._revision(upgrade.settled)
        controls = [(g.group_id, settled) for g in self._groups() if g.revision == settled]
        bad = self.watches.why_slow_or_failing(
            watch, controls, (seen.group_id, settled), limits, self.now
        )
        return f"{seen.group_id}: {bad}" if bad else ""

    def _done(self, upgrade: Upgrade) -> Upgrade:
        self._tell("done", upgrade)
        target, version = upgrade.target, self.look.version
        return Upgrade(self.scenario, target, version, target, upgrade.version, is_proved=True)

    # --- back ------------------------------------------------------------------------------------

    def _turned_back(self, upgrade: Upgrade, reason: str) -> Upgrade:
        back = f"version {upgrade.version}: {reason}"
        after = replace(upgrade, back=back, canary_share=0.0)
        self._tell("turned_back", after, upgrade.current, reason)
        if upgrade.current:
            after = after.moved(upgrade.current)
        return self._go_back(after)

    def _go_back(self, upgrade: Upgrade) -> Upgrade:
        why_stopped = self._restore(upgrade)
        if upgrade.current:
            upgrade = upgrade.moved(upgrade.current)
            seen = self.look.groups[upgrade.current]
            if not self._is_back(upgrade, seen):
                state = f" ({seen.detail})" if seen.detail else ""
                way_out = "; it had better get another file" if seen.failure else ""
                self._say(upgrade, "going back", f"{seen.group_id}{state}{way_out}: {upgrade.back}")
                return upgrade
            self._tell("back", upgrade, seen.group_id, self._not_whole().lstrip("; "))
            upgrade = replace(upgrade, current="")
        return self._next_back(upgrade, why_stopped)

    def _is_back(self, upgrade: Upgrade, seen: GroupSeen) -> bool:
        """Whether the group is complete with the old revision again.

        It counts, too, if it has lacked instances for so long that the others need not wait.
        """
        if seen.revision != self._revision(upgrade.settled):
            return False
        watch = self._watch(seen.group_id, upgrade.settled)
        watch.note(seen, self.now)
        since = watch.lacking_since
        patience_s = self.look.limits_of(self.scenario).group_timeout_s
        return seen.is_whole or (since is not None and self.now - since > patience_s)

    def _next_back(self, upgrade: Upgrade, why_stopped: str) -> Upgrade:
        left = [g for g in self._groups() if upgrade.service_of(g.group_id) != upgrade.settled]
        for group in left:
            if not group.serves:
                upgrade = upgrade.moved(group.group_id)
        serving = sorted((g for g in left if g.serves), key=lambda g: g.is_whole)
        if serving:
            # Do not wait for these: groups of the bad revision, or without instances for them, may
            # never be complete again.
            bad = {g.group_id for g in left} | {g.group_id for g in self._groups() if g.is_lacking}
            group_id = serving[0].group_id
            why = self._why_not_now(bad, self.look.planning - self.look.gathering)
            if not why and (no_room := self._why_no_room(serving[0])):
                why = (
                    f"{no_room}, or, if an outage is better, a file without {group_id} for a moment"
                )
            if why:
                self._say(upgrade, "going back", f"{group_id}: {why}{why_stopped}; {upgrade.back}")
                return upgrade
            return self._change(upgrade, serving[0])
        if upgrade.target != upgrade.settled:
            self._say(upgrade, "stopped", f"{upgrade.back}{why_stopped}")
            return upgrade
        self._tell("went_back", upgrade, reason=upgrade.back)
        self._say(upgrade, "went back", upgrade.back)
        return replace(
            upgrade,
            changed={},
            back="",
            outcome=upgrade.back,
            settled_version=self.look.version,
        )

    def _restore(self, upgrade: Upgrade) -> str:
        """Restore the version before, unless an operator has changed more since.

        Returns what the operator must do if it cannot be restored.
        """
        if upgrade.target == upgrade.settled:
            return ""
        number, before = upgrade.version, upgrade.settled_version
        if self.look.version != number or before != number - 1:
            return "; later versions have changed more: apply a right file"
        if before in self.look.lost_versions:
            return f"; version {before} is not kept any more: apply a right file"
        self.told.append(RestoreVersion(before, number, upgrade.back))
        return ""

    # --- small things ----------------------------------------------------------------------------

    def _change(self, upgrade: Upgrade, group: GroupSeen) -> Upgrade:
        after = replace(upgrade.moved(group.group_id), current=group.group_id)
        self.watches.forget(self.scenario)
        self._watch(group.group_id, after.goal)  # from now on, before its first answer
        self._tell("changing", after, group.group_id, upgrade.back)
        self._say(after, "going back" if upgrade.back else "changing", group.group_id)
        return after

    def _why_not_now(self, may_be_broken: Collection[str], planning: Collection[str]) -> str:
        """Why no group may be changed now; empty if one may.

        Groups in `may_be_broken` need not be complete for it.
        """
        if self.is_taken:
            return "a group of another scenario is being changed"
        if self.scenario in planning:
            return "a plan is under way"
        broken = (g for g in self._groups() if g.serves and not g.is_whole)
        found = next((g for g in broken if g.group_id not in may_be_broken), None)
        if found is None:
            return ""
        return f"group {found.group_id} is not whole: {found.detail}".rstrip(": ")

    def _not_whole(self) -> str:
        found = [f"{g.group_id}: {g.detail}".rstrip(": ") for g in self._groups() if not g.is_whole]
        return f"; not whole yet: {', '.join(found)}" if found else ""

    def _why_no_room(self, group: GroupSeen) -> str:
        """Why the group cannot spare the instances that must leave first; empty if it can.

        These are as many as there are too few blank instances for, whichever they are.
        """
        short = max(0, group.size - group.num_blank)
        if not short:
            return ""
        others = [g for g in self._groups() if g.serves]
        num_leaving = 0
        for role in (r for r, count in group.counts.items() if count):
            total, own = sum(g.counts[role] for g in others), group.counts[role]
            of_floor = Role.PREFILL if role is Role.FUSION else role
            floor = max(1, self.look.floors.get((self.scenario, of_floor), 0))
            num_leaving += max(0, min(own, total - floor))
            if why := _why_too_busy(others, role, max(floor, total - min(short, own))):
                return f"{why}; {_more_needed(short)}"
        if num_leaving < short:
            few = f"only {num_leaving} instance{'' if num_leaving == 1 else 's'} may leave"
            return f"{few}; {_more_needed(short - num_leaving)}"
        return ""

    def _groups(self) -> list[GroupSeen]:
        return self.look.serving(self.scenario)

    def _revision(self, service: Service) -> str:
        return revision_of(service, self.kv_transport)

    def _watch(self, group_id: str, service: Service) -> Watch:
        return self.watches.watch(self.scenario, (group_id, self._revision(service)), self.now)

    def _tell(self, step: str, upgrade: Upgrade, group_id: str = "", reason: str = "") -> None:
        self.told.append(Told(self.scenario, step, upgrade.version, group_id, reason))

    def _say(self, upgrade: Upgrade, state: str, detail: str) -> None:
        groups = self._groups()
        is_changed = [upgrade.service_of(g.group_id) == upgrade.goal for g in groups]
        self.report = UpgradeReport(
            self.scenario, upgrade.version, state, detail, sum(is_changed), len(groups)
        )


def _more_needed(num: int) -> str:
    return f"{num} more blank instance{' is' if num == 1 else 's are'} needed"


def _why_too_busy(groups: Iterable[GroupSeen], role: Role, num_left: int) -> str:
    taken = 0.0
    for group in groups:
        if not group.counts[role]:
            continue
        if (busy := group.busy.get(role)) is None:
            return f"the load of {group.group_id}'s {role.value}s is unknown"
        taken += busy * group.counts[role]
    share = taken / num_left
    return f"{num_left} {role.value} would be {share:.0%} busy" if share > MAX_BUSY else ""

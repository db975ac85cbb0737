"""The commands by which operators see and change the groups of a mesh.

`pdmesh groups` and `history` show the groups and the versions of the desired state, which is a file
with the groups that the mesh should have. `diff` compares a file with the desired state. `apply`
and `rollback` change the desired state. `promote` gives the revision of a canary, an extra group
that tried the revision first, to all groups. `drain`, `cordon` and `uncordon` take instances out of
service and put them back.
"""

from __future__ import annotations

import argparse
import asyncio
import getpass
import sys
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Final

from pdmesh.cli.commands.rollout import done_text, wait
from pdmesh.cli.errors import CommandFailed
from pdmesh.cli.hints import hint
from pdmesh.cli.leader import leader_of
from pdmesh.cli.texts import text_of
from pdmesh.cli.view.counts import counts, rank_text, ready_counts
from pdmesh.cli.view.output import show
from pdmesh.cli.view.table import table
from pdmesh.cli.view.usage_text import usage_text
from pdmesh.core.moves.move import OFF_POOL
from pdmesh.desired_file import read
from pdmesh.errors import MeshError
from pdmesh.v1 import admin_service_pb2 as pb
from pdmesh.v1.common_pb2 import InstancePhase, Role
from pdmesh.v1.groups_pb2 import Stage

_DIFF_FAILED: Final = 2
Command = Callable[[argparse.Namespace], Coroutine[None, None, int]]


def run(options: argparse.Namespace) -> int:
    try:
        return asyncio.run(_COMMANDS[options.command](options))
    except (CommandFailed, MeshError) as exc:
        if options.command != "diff":
            raise
        raise CommandFailed(getattr(exc, "message", str(exc)), _DIFF_FAILED) from exc


async def _groups(options: argparse.Namespace) -> int:
    if options.text is not None:
        return await _file(options)
    if options.usage:
        return await _usage(options)
    states = await leader_of(options).groups()
    how = hint(options.state_dir, "apply FILE")
    show(options, states, lambda: groups_text(states, how))
    return 0


async def _file(options: argparse.Namespace) -> int:
    """Print only the file of one version, so that the user can edit the file and apply it."""
    desired = await leader_of(options).desired(options.text)
    if desired is None:
        raise CommandFailed(
            "no desired state has been applied yet; apply one with: "
            f"{hint(options.state_dir, 'apply FILE')}"
        )
    print(desired.text, end="" if desired.text.endswith("\n") else "\n")
    return 0


async def _usage(options: argparse.Namespace) -> int:
    response = await leader_of(options).usage()
    show(options, response.book, lambda: usage_text(response.book))
    return 0


async def _diff(options: argparse.Namespace) -> int:
    """Show the differences. The exit code is 1 if there are any (2 after an error, see `run`)."""
    response = await leader_of(options).diff(text_of(options.file))
    show(options, response, lambda: _changes_text(response.changes, f"version {response.version}"))
    return 1 if response.changes else 0


async def _apply(options: argparse.Namespace) -> int:
    text = text_of(options.file)
    response = await leader_of(options).apply(
        text,
        author=_user(),
        reason=options.reason,
        expected_version=options.expect_version,
        allow_empty=options.allow_empty,
        canary_share=options.canary,
    )
    show(options, response, lambda: _applied_text(response, hint(options.state_dir, "groups")))
    if missing := await _missing_instances(options, text):
        print(f"pdmesh: {missing}", file=sys.stderr)
    if options.wait:
        await _until_rolled_out(options, response.version)
    return 0


async def _until_rolled_out(options: argparse.Namespace, version: int) -> None:
    """Wait for the rollout, and report its end on stderr, because stdout already has the result."""
    print(done_text(version, await wait(options, version)), file=sys.stderr)


async def _history(options: argparse.Namespace) -> int:
    response = await leader_of(options).history(options.limit)
    show(options, response, lambda: history_text(response.versions))
    return 0


async def _missing_instances(options: argparse.Namespace, text: str) -> str:
    """A message if the groups need more instances than can get a role, or an empty string."""
    desired = read(text)
    wanted = sum(map(desired.num_instances, desired.groups.values()))
    if not wanted:
        return ""
    states = await leader_of(options).groups()
    # An instance that changes its role may be in both lists.
    members = (member.instance_id for group in states.groups for member in group.members)
    there = len({*states.blank_instance_ids, *members})
    if wanted <= there:
        return ""
    return (
        f"the groups need {wanted} instances, but only {there} can get a role: they wait for "
        f"{wanted - there} more"
    )


async def _rollback(options: argparse.Namespace) -> int:
    response = await leader_of(options).rollback(
        options.version, author=_user(), reason=options.reason, allow_empty=options.allow_empty
    )
    show(options, response, lambda: _restored_text(response))
    if options.wait:
        await _until_rolled_out(options, response.version)
    return 0


async def _promote(options: argparse.Namespace) -> int:
    response = await leader_of(options).promote(options.scenario)
    follow = hint(options.state_dir, "groups")
    show(
        options,
        response,
        lambda: "\n".join(
            f"scenario {scenario}: all groups get the canary's revision; follow it with: {follow}"
            for scenario in response.scenarios
        ),
    )
    return 0


def _cordon(*, at_once: bool) -> Command:
    async def cordon(options: argparse.Namespace) -> int:
        response = await leader_of(options).cordon(
            options.instance, reason=options.reason, at_once=at_once
        )
        how = hint(options.state_dir, f"uncordon {options.instance}")
        out = f"{options.instance} is being taken out of service; put it back with: {how}"
        show(options, response, lambda: out)
        return 0

    return cordon


async def _uncordon(options: argparse.Namespace) -> int:
    response = await leader_of(options).uncordon(options.instance)
    show(options, response, lambda: _put_back_text(options.instance, response.fault))
    return 0


_COMMANDS: Final[Mapping[str, Command]] = {
    "groups": _groups,
    "diff": _diff,
    "apply": _apply,
    "rollback": _rollback,
    "history": _history,
    "promote": _promote,
    "drain": _cordon(at_once=False),
    "cordon": _cordon(at_once=True),
    "uncordon": _uncordon,
}


def history_text(versions: Iterable[pb.DesiredVersion]) -> str:
    rows = [
        (
            str(each.version),
            each.applied_at.ToDatetime().strftime("%Y-%m-%d %H:%M:%SZ"),
            each.author or "-",
            f"{each.canary_share:.0%}" if each.canary_share else "-",
            each.reason,
        )
        for each in versions
    ]
    return table(("VERSION", "APPLIED", "AUTHOR", "CANARY", "REASON"), rows)


def groups_text(states: pb.ListGroupStatesResponse, how_to_apply: str = "pdmesh apply FILE") -> str:
    """The text of `pdmesh groups`: groups, members, upgrades, and instances outside of groups."""
    groups = [
        (
            group.group_id, group.scenario, group.state,
            counts(
                group.num_prefill_wanted,
                group.num_decode_wanted,
                group.num_fusion_wanted,
                group.num_pooling_wanted,
                group.num_encoder_wanted,
            ),
            ready_counts(group.members), group.revision,
            ", ".join(group.regions), group.detail,
        )
        for group in states.groups
    ]  # fmt: skip
    parts = [
        f"desired state: version {states.version}"
        if states.version
        else f"desired state: none; apply one with: {how_to_apply}",
        table(("GROUP", "SCENARIO", "STATE", "WANTED", "READY", "REVISION", "REGION", "DETAIL"),
            groups),
        "",
        table(
            ("INSTANCE", "GROUP", "ROLE", "PHASE", "MAY", "REVISION", "DOMAIN"),
            [
                (
                    m.instance_id, group.group_id, _lower(Role.Name(m.role), "ROLE_"),
                    _lower(InstancePhase.Name(m.phase), "INSTANCE_PHASE_"),
                    _lower(Stage.Name(m.stage), "STAGE_"), m.revision, rank_text(m.domain),
                )
                for group in states.groups
                for m in group.members
            ],
        ),
    ]  # fmt: skip
    if states.paused:
        parts.insert(1, f"THE LEADER MAKES NO CHANGES NOW: {states.paused}")
    parts += map(_upgrade_line, states.upgrades)
    if states.blank_instance_ids:
        parts.append("\nblank: " + ", ".join(states.blank_instance_ids))
    for each in states.adjustments:
        shall = counts(each.num_prefill, each.num_decode, 0)
        if each.pool:
            shall = "off" if each.pool == OFF_POOL else f"lent to {each.pool}"
        parts.append(f"adjusted: {each.group_id}: {shall} ({each.reason})")
    for entry in states.out_of_service:
        what = "ejected" if entry.is_ejected else "cordoned"
        drain = ", to drain" if entry.mode == pb.LEAVE_MODE_DRAIN else ""
        parts.append(f"{what}{drain}: {entry.instance_id} ({entry.reason})")
    if states.page_url:
        parts.append(f"\npage: {states.page_url}")
    return "\n".join(parts)


def _upgrade_line(upgrade: pb.UpgradeState) -> str:
    if upgrade.state == "went back":
        return f"\nupgrade of {upgrade.scenario} was rolled back: {upgrade.detail}"
    how_far = f"{upgrade.num_changed} of {upgrade.num_groups} groups"
    return (
        f"\nupgrade of {upgrade.scenario} to version {upgrade.version}: {upgrade.state}, "
        f"{how_far}; {upgrade.detail}"
    )


def _lower(name: str, prefix: str) -> str:
    return name.removeprefix(prefix).lower()


def _applied_text(response: pb.ApplyDesiredResponse, how_to_follow: str) -> str:
    version = f"version {response.version}"
    changes = _changes_text(response.changes, version)
    return f"{changes}\n{version} is the desired state; follow it with: {how_to_follow}"


def _restored_text(response: pb.RollbackDesiredResponse) -> str:
    changes = _changes_text(response.changes, "the version before")
    restored = f"version {response.version} has the content of version {response.restored_version}"
    return f"{changes}\n{restored}"


def _put_back_text(instance: str, fault: str) -> str:
    back = f"{instance} is back in service and may get a role"
    if not fault:
        return back
    return f"{back}\nits faults are judged again; this one would eject it again: {fault}"


def _changes_text(changes: Iterable[pb.DesiredChange], compared_with: str) -> str:
    lines = [_change_line(change) for change in changes]
    return "\n".join(lines) if lines else f"nothing differs from {compared_with}"


def _change_line(change: pb.DesiredChange) -> str:
    if not change.HasField("before"):
        return f"+ {change.path}: {change.after}"
    if not change.HasField("after"):
        return f"- {change.path}: {change.before}"
    return f"~ {change.path}: {change.before} -> {change.after}"


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "somebody"

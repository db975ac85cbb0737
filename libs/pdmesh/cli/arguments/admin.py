"""The arguments of commands by which operators show or change groups and instances."""

from __future__ import annotations

import argparse
from pathlib import Path

from pdmesh.cli import values
from pdmesh.cli.arguments import options
from pdmesh.cli.arguments.options import Commands
from pdmesh.cli.parser import CommandParser


def add_desired(commands: Commands) -> None:
    """Add the commands about the groups and the desired state."""
    groups = _add(commands, "groups", "show the groups and their members", is_watched=True)
    groups.add_argument("--usage", action="store_true", help="show how long instances were used")
    groups.add_argument(
        "--text",
        type=values.version,
        nargs="?",
        const=0,
        metavar="VERSION",
        help="print the file of a version of the desired state (default: the current version)",
    )
    _add(commands, "diff", "show what a file changes").add_argument(
        "file", type=Path, help="the file; - reads stdin"
    )
    apply = _add(commands, "apply", "make a file the new desired state")
    apply.add_argument("file", type=Path, help="the file; - reads stdin")
    apply.add_argument(
        "--expect-version",
        type=values.version,
        metavar="N",
        help="change nothing unless version N is current",
    )
    apply.add_argument(
        "--canary",
        type=values.share,
        default=0.0,
        metavar="SHARE",
        help="give the changed services only this share of the requests (e.g. 0.05) until pdmesh "
        "promote or rollback",
    )
    promote = _add(
        commands, "promote", "roll a canary's revision out to all groups of its scenario"
    )
    promote.add_argument(
        "scenario", nargs="?", default="", help="default: all scenarios with a canary"
    )
    rollback = _add(commands, "rollback", "restore an earlier version of the desired state")
    rollback.add_argument(
        "version", type=values.version, nargs="?", default=0, help="default: the previous one"
    )
    for parser in (apply, rollback):
        parser.add_argument(
            "--allow-empty",
            action="store_true",
            help="accept a file without groups, which releases all instances",
        )
        _add_reason(parser)
        parser.add_argument(
            "--wait", action="store_true", help="wait until the groups are as the file says"
        )
        _add_timeout(parser)
    _add(commands, "history", "show the versions of the desired state").add_argument(
        "--limit", type=values.positive_int, default=20, metavar="N", help="default: %(default)s"
    )
    _add_rollout(commands)


def _add_rollout(commands: Commands) -> None:
    parser = _add(commands, "rollout", "wait for a version of the desired state")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    status = actions.add_parser(
        "status", parents=[options.of_admin()], help="wait until the groups are as a version says"
    )
    status.add_argument(
        "--version", type=values.version, metavar="N", default=0, help="default: the current one"
    )
    _add_timeout(status)
    status.set_defaults(module="rollout")


def add_instances(commands: Commands) -> None:
    """Add the commands that take an instance out of service and put it back."""
    drain = _add(
        commands, "drain", "take an instance out of service gracefully: it finishes its requests"
    )
    cordon = _add(
        commands, "cordon", "take an instance out of service at once: its requests move to others"
    )
    uncordon = _add(
        commands, "uncordon", "put a cordoned, drained or ejected instance back into service"
    )
    for parser in (drain, cordon, uncordon):
        parser.add_argument("instance", help="the instance's name, as in pdmesh status")
    for parser in (drain, cordon):
        _add_reason(parser)


def _add(commands: Commands, name: str, help: str, *, is_watched: bool = False) -> CommandParser:
    parents = [options.of_admin(), *([options.of_watch()] if is_watched else [])]
    parser = commands.add_parser(name, parents=parents, help=help)
    parser.set_defaults(module="admin")
    return parser


def _add_timeout(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--timeout",
        type=values.positive,
        default=600.0,
        metavar="SECONDS",
        help="longest wait (default: %(default)g)",
    )


def _add_reason(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--reason", default="", help="a reason, recorded with the change")


def add_ratio(commands: Commands) -> None:
    parser = _add(
        commands,
        "ratio",
        "show decisions about P:D ratios, or change groups by hand",
        is_watched=True,
    )
    parser.set_defaults(module="ratio")
    parser.add_argument(
        "scenario",
        nargs="?",
        default="",
        help="default: show all scenarios, or change the scenario `default`",
    )
    asked = parser.add_mutually_exclusive_group()
    roles = ("prefill", "decode")
    asked.add_argument(
        "--more", choices=roles, help="turn one instance of the other role into this role"
    )
    asked.add_argument("--add", choices=roles, help="give a blank instance this role")
    asked.add_argument("--remove", choices=roles, help="make one instance of this role blank")
    asked.add_argument(
        "--profile",
        type=values.positive,
        nargs=4,
        metavar=("T_P", "B_P", "T_D", "B_D"),
        help="move all groups to the best ratio for requests that take T_P and T_D seconds with "
        "B_P and B_D busy slots",
    )
    parser.add_argument("--group", default="", metavar="GROUP", help="the group to change")
    parser.add_argument(
        "--force",
        action="store_true",
        help="make the move even if the remaining instances become too busy",
    )
    _add_reason(parser)

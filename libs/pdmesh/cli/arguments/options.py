"""Options that several commands share.

A shared option may come before the command or after any of its words. If it is given several times,
the last value wins. Only the main parser has defaults for these options, because a default in a
command's parser would replace a value that was given before the command.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TypeAlias

from pdmesh.cli import values
from pdmesh.cli.hints import default_state_dir
from pdmesh.cli.parser import CommandParser

Commands: TypeAlias = "argparse._SubParsersAction[CommandParser]"


def with_defaults(parser: argparse.ArgumentParser) -> None:
    """Add every shared option with its default."""
    _add_state_dir(parser)
    _add_nats_url(parser)
    _add_token(parser)
    parser.set_defaults(
        state_dir=default_state_dir(),
        nats_url=os.environ.get("PDMESH_NATS_URL") or None,
        admin_token=own_token("PDMESH_ADMIN_TOKEN"),
        admin_token_file=None,
        output="text",
        watch=False,
    )


def own_token(shared_variable: str) -> str:
    """The caller's own token from $PDMESH_TOKEN, or else the secret in `shared_variable`."""
    return os.environ.get("PDMESH_TOKEN") or os.environ.get(shared_variable, "")


def of_state() -> CommandParser:
    """The shared options of commands that need no running mesh."""
    parent = CommandParser(add_help=False)
    _add_state_dir(parent)
    return parent


def of_mesh() -> CommandParser:
    """The shared options of commands that talk to a mesh."""
    parent = CommandParser(add_help=False, parents=[of_state()])
    _add_nats_url(parent)
    return parent


def of_admin() -> CommandParser:
    """The shared options of commands that call the leading master."""
    parent = CommandParser(add_help=False, parents=[of_mesh(), of_output()])
    _add_token(parent)
    return parent


def of_output() -> CommandParser:
    """The shared options of commands whose result a program may read."""
    parent = CommandParser(add_help=False)
    add = parent.add_argument
    add(
        "-o",
        "--output",
        choices=["text", "json", "yaml"],
        default=argparse.SUPPRESS,
        help="form of the result (default: text)",
    )
    add(
        "--json",
        dest="output",
        action="store_const",
        const="json",
        default=argparse.SUPPRESS,
        help="the same as -o json",
    )
    return parent


def of_watch() -> CommandParser:
    """The shared options of commands that can be repeated until Ctrl-C."""
    parent = CommandParser(add_help=False)
    add = parent.add_argument
    add(
        "-w",
        "--watch",
        action="store_true",
        default=argparse.SUPPRESS,
        help="show it again and again, until Ctrl-C",
    )
    add_every(parent, 2.0)
    return parent


def add_every(parser: argparse.ArgumentParser, default: float) -> None:
    parser.add_argument(
        "--every",
        type=values.positive,
        default=default,
        metavar="SECONDS",
        help="pause between two views (default: %(default)g)",
    )


def _add_state_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--state-dir",
        type=Path,
        default=argparse.SUPPRESS,
        help=f"where the mesh keeps its state and logs (default: {default_state_dir()})",
    )


def _add_nats_url(parser: argparse.ArgumentParser) -> None:
    """Add --nats-url, whose default comes from the environment.

    The URL may contain a password, which other users of the machine could read on a command line.
    """
    parser.add_argument(
        "--nats-url",
        default=argparse.SUPPRESS,
        help="NATS of a mesh started elsewhere (default: $PDMESH_NATS_URL)",
    )


def _add_token(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--admin-token",
        default=argparse.SUPPRESS,
        help="the admin token (default: $PDMESH_ADMIN_TOKEN)",
    )
    add(
        "--token",
        dest="admin_token",
        default=argparse.SUPPRESS,
        help="your own token of the OpenID provider, or an API key with a role (default: "
        "$PDMESH_TOKEN, which wins over $PDMESH_ADMIN_TOKEN)",
    )
    add(
        "--admin-token-file",
        type=Path,
        default=argparse.SUPPRESS,
        metavar="FILE",
        help="file with the admin token",
    )

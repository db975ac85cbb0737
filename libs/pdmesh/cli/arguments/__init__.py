"""Defines the arguments of every `pdmesh` command."""

from __future__ import annotations

from pdmesh import __version__
from pdmesh.cli import values
from pdmesh.cli.arguments import admin, looks, options, planning, stores, up
from pdmesh.cli.arguments.options import Commands
from pdmesh.cli.parser import CommandParser


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog="pdmesh", description="Prefill and decode on different instances, as a mesh."
    )
    parser.add_argument("--version", action="version", version=__version__)
    options.with_defaults(parser)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    up.add_up(commands)
    _add_down(commands)
    looks.add_status(commands)
    looks.add_chat(commands)
    looks.add_events(commands)
    looks.add_top(commands)
    looks.add_logs(commands)
    looks.add_trace(commands)
    looks.add_doctor(commands)
    admin.add_desired(commands)
    admin.add_ratio(commands)
    admin.add_instances(commands)
    stores.add_keys(commands)
    stores.add_pins(commands)
    stores.add_adapters(commands)
    stores.add_artefact(commands)
    stores.add_certs(commands)
    stores.add_access(commands)
    stores.add_hosts(commands)
    planning.add_plan(commands)
    looks.add_completion(commands)
    return parser


def _add_down(commands: Commands) -> None:
    down = commands.add_parser("down", parents=[options.of_state()], help="stop the mesh")
    down.add_argument(
        "--timeout", type=values.positive, default=40.0, help="seconds until the mesh is killed"
    )

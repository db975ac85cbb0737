"""The arguments of commands that read from a mesh (`status`, `chat`, `logs`), and `completion`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from pdmesh.cli import values
from pdmesh.cli.arguments import options
from pdmesh.cli.arguments.options import Commands


def add_status(commands: Commands) -> None:
    parser = commands.add_parser(
        "status",
        parents=[options.of_mesh(), options.of_output(), options.of_watch()],
        help="show what is running",
    )
    parser.set_defaults(module="look.status")


def add_chat(commands: Commands) -> None:
    parser = commands.add_parser(
        "chat", parents=[options.of_state()], help="ask the model a question"
    )
    parser.add_argument("prompt", help="the question; - reads it from stdin")
    parser.add_argument("--url", help="URL of a gateway (default: the mesh started here)")
    parser.add_argument(
        "--model",
        default="default",
        help="name of a served model (default: the gateway's default model)",
    )
    parser.add_argument(
        "--max-tokens",
        type=values.positive_int,
        default=256,
        metavar="N",
        help="default: %(default)s",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="sampling temperature (default: 0, which is greedy)",
    )
    parser.add_argument(
        "--api-key",
        default=os.environ.get("PDMESH_API_KEY") or os.environ.get("PDMESH_TOKEN", ""),
        help="the API key, or a token of the OpenID provider (default: $PDMESH_API_KEY, else "
        "$PDMESH_TOKEN)",
    )


def add_events(commands: Commands) -> None:
    parser = commands.add_parser(
        "events",
        parents=[options.of_mesh(), options.of_output()],
        help="follow the mesh's events",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "pattern", nargs="?", default="", help="NATS subject, e.g. mesh.v1.health.*.decode-0"
    )
    which.add_argument(
        "--domain",
        type=values.names,
        default=(),
        metavar="A,B",
        help="only events of these domains, e.g. health,group",
    )
    parser.add_argument(
        "--periodic",
        action="store_true",
        help="also show heartbeats, node reports and loads, which are sent all the time; "
        "without it, they are shown only if a PATTERN is given",
    )
    parser.set_defaults(module="look.events")


def add_logs(commands: Commands) -> None:
    parser = commands.add_parser(
        "logs", parents=[options.of_state()], help="show the logs of the mesh started here"
    )
    add = parser.add_argument
    add("processes", nargs="*", metavar="PROCESS", help="such as decode-0 (default: all)")
    add("-f", "--follow", action="store_true", help="keep printing new lines, until Ctrl-C")
    add(
        "-n",
        "--lines",
        type=values.positive_int,
        metavar="N",
        default=200,
        help="number of past lines, the latest ones (default: %(default)s)",
    )
    add("--request", metavar="ID", help="only lines with this request's id")
    add(
        "--level",
        choices=["debug", "info", "warning", "error"],
        help="only lines of this level or a more severe one",
    )
    add(
        "--json",
        dest="output",
        action="store_const",
        const="json",
        default=argparse.SUPPRESS,
        help="print the lines as they were written",
    )
    parser.set_defaults(module="look.logs")


def add_trace(commands: Commands) -> None:
    parser = commands.add_parser(
        "trace",
        parents=[options.of_state(), options.of_output()],
        help="tell what happened to a request, step by step",
    )
    parser.add_argument(
        "request",
        metavar="REQUEST",
        help="the id in its answer (chatcmpl-..., resp_..., msg_...), or the value of the header "
        "x-request-id",
    )
    parser.set_defaults(module="look.trace")


def add_doctor(commands: Commands) -> None:
    parser = commands.add_parser(
        "doctor",
        parents=[options.of_mesh(), options.of_output()],
        help="find what is wrong with this machine, the settings and the mesh",
    )
    parser.add_argument(
        "--engine", choices=["vllm", "sim"], default="vllm", help="the engine to run here"
    )
    parser.add_argument("--groups", type=Path, metavar="FILE", help="also check a desired state")
    parser.set_defaults(module="look.doctor")


def add_top(commands: Commands) -> None:
    parser = commands.add_parser(
        "top", parents=[options.of_mesh()], help="show what the mesh is doing, until Ctrl-C"
    )
    options.add_every(parser, 1.0)
    parser.set_defaults(module="look.top")


def add_completion(commands: Commands) -> None:
    parser = commands.add_parser(
        "completion", parents=[options.of_state()], help="print a script that completes commands"
    )
    parser.add_argument("shell", choices=["bash", "zsh", "tcsh"])

"""`pdmesh completion`: prints a script with which a shell completes commands and options."""

from __future__ import annotations

import argparse

import shtab

from pdmesh.cli.arguments import build_parser


def run(options: argparse.Namespace) -> int:
    print(shtab.complete(build_parser(), options.shell))
    return 0

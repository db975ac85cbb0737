"""Runs a command repeatedly, and shows each result."""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import time
from collections.abc import Callable

from pdmesh.cli.errors import CommandFailed
from pdmesh.errors import MeshError

TO_TOP_AND_CLEAR = "\x1b[H\x1b[J"


def watched(run: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """Run until Ctrl-C, and return 0. Raises what the first run raises.

    A later failure is shown instead of the result: a mesh that lost its leader, for example, soon
    has another.
    """
    before = TO_TOP_AND_CLEAR if sys.stdout.isatty() else ""
    shown = _shown(run, options)
    try:
        while True:
            sys.stdout.write(f"{before}{shown}")
            sys.stdout.flush()
            time.sleep(options.every)
            try:
                shown = _shown(run, options)
            except CommandFailed as exc:
                shown = f"{exc}\n"
            except MeshError as exc:
                shown = f"{exc.message}\n"
    except KeyboardInterrupt:
        return 0


def _shown(run: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as text:
        run(options)
    return text.getvalue()

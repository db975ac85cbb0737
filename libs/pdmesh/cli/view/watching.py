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
    """Run the command repeatedly until Ctrl-C, and return 0. Raises the error of the first run.

    The error of a later run is shown instead of the result, because it may be temporary. For
    example, a mesh that lost its leader soon has another one.
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

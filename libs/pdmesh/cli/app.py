"""Runs a `pdmesh` command. If the command fails, prints the reason in one line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from pdmesh.cli.arguments import build_parser
from pdmesh.cli.errors import CommandFailed
from pdmesh.cli.view.watching import watched
from pdmesh.errors import MeshError

Command = Callable[[argparse.Namespace], int]


def main(arguments: Sequence[str] | None = None) -> None:
    _open_closed_streams()
    options = build_parser().parse_args(arguments)
    module = getattr(options, "module", options.command)
    try:
        _check_state_dir(options.state_dir)
        # The import is inside this `try` because it is slow: a user may press Ctrl-C during it.
        run: Command = import_module(f"pdmesh.cli.commands.{module}").run
        code = _flushed(watched(run, options) if options.watch else run(options))
    except CommandFailed as exc:
        print(f"pdmesh: {exc}", file=sys.stderr)
        code = exc.code
    except MeshError as exc:
        print(f"pdmesh: {exc.message}", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:  # the reader has ended, as in `pdmesh events | head`
        _mute()
        code = 0
    except OSError as exc:
        code = _explained(exc)
    sys.exit(code)


def _open_closed_streams() -> None:
    """Replace streams that the caller closed, as in `pdmesh chat hi >&-`.

    Python sets such a stream to None.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115  # until the end


def _explained(exc: OSError) -> int:
    """Print the reason of an OSError, for example missing permission or a full disk. Returns 1."""
    if exc.filename is None and _flushed(0):
        return 1
    where = f"{exc.filename}: " if exc.filename is not None else ""
    print(f"pdmesh: {where}{exc.strerror or exc}", file=sys.stderr)
    return 1


def _check_state_dir(state_dir: Path) -> None:
    for path in (state_dir, *state_dir.parents):
        if path.exists():
            if not path.is_dir():
                raise CommandFailed(f"--state-dir: {path} is not a directory")
            return


def _flushed(code: int) -> int:
    """Flush stdout and return the exit code. Raises BrokenPipeError."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as exc:
        print(f"pdmesh: cannot write to stdout: {exc.strerror}", file=sys.stderr)
        _mute()
        return code or 1
    return code


def _mute() -> None:
    """Drop the unwritten output, which Python would try to write again when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()

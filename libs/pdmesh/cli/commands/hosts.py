"""`pdmesh hosts`: makes the folders of a mesh over several hosts."""

from __future__ import annotations

import argparse
from pathlib import Path

from pdmesh.cli.errors import CommandFailed
from pdmesh.cli.texts import text_of
from pdmesh.errors import BadCertificates, InvalidRequest
from pdmesh.launcher.hosts.layout import read
from pdmesh.launcher.hosts.prepare import prepare


def run(options: argparse.Namespace) -> int:
    file: Path = options.layout
    try:
        layout = read(text_of(file))
        folders = prepare(layout, options.out, options.days)
    except InvalidRequest as exc:
        raise CommandFailed(f"{file}: {exc.message}", 2) from exc
    except BadCertificates as exc:
        raise CommandFailed(exc.message) from exc
    except OverflowError as exc:
        raise CommandFailed(f"--days: {exc}") from exc
    for folder in folders:
        print(folder)
    return 0

"""`pdmesh trace`: shows the steps of one request, from the logs of the mesh started here."""

from __future__ import annotations

import argparse

from pdmesh.cli.errors import CommandFailed
from pdmesh.cli.view.log_files import read_logs
from pdmesh.cli.view.output import show
from pdmesh.cli.view.request_story import as_data, as_rows, lines_about, story
from pdmesh.cli.view.table import table


def run(options: argparse.Namespace) -> int:
    folder = options.state_dir / "logs"
    lines = lines_about(options.request, read_logs(folder))
    if not lines:
        raise CommandFailed(
            f"no log in {folder} names request {options.request}: it still runs, its log lines "
            "are gone, or another mesh served it"
        )
    steps = story(lines)
    header = ("time", "since", "told by", "what")
    show(options, as_data(steps), lambda: table(header, as_rows(steps)))
    return 0

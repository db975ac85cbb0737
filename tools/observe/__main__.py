"""Writes the dashboards: `python -m tools.observe`."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tools.observe.dashboard import to_json
from tools.observe.dashboards import DASHBOARDS

FOLDER: Final = Path("deploy/observe/grafana/dashboards")


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for dashboard in DASHBOARDS:
        (FOLDER / f"{dashboard.uid}.json").write_text(to_json(dashboard))


if __name__ == "__main__":
    main()

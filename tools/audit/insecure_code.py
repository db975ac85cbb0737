"""Finds code of libs and services that is insecure by ruff's S rules (flake8-bandit).

pyproject.toml has the rules that we do not follow, each with its reason. A line with an exception
must give the reason itself.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_FOLDERS: Final = ("libs", "services")
_EXCEPTED: Final = re.compile(r"#\s*noqa:[^#]*\bS\d{3}\b(?P<rest>.*)$")


def found_by_ruff(ruff: Path, root: Path) -> Iterator[str]:
    command = [str(ruff), "check", *_FOLDERS, "--output-format", "json", "--no-fix"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    for each in json.loads(done.stdout):
        if re.fullmatch(r"S\d{3}", each["code"] or ""):
            place = f"{Path(each['filename']).relative_to(root)}:{each['location']['row']}"
            yield f"code: {place}: {each['code']} {each['message']}"


def silent_exceptions(root: Path) -> Iterator[str]:
    """Findings for lines that have an exception from an S rule without a reason."""
    for folder in _FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            for number, line in enumerate(path.read_text().splitlines(), 1):
                excepted = _EXCEPTED.search(line)
                if excepted and not _says_why(excepted["rest"]):
                    yield f"code: {path.relative_to(root)}:{number}: says not why S is excepted"


def _says_why(rest: str) -> bool:
    """Whether a reason follows the codes."""
    return bool(re.search(r"[a-z]{2,}", rest))

"""Finds passwords, tokens and keys in files of the repository, with detect-secrets."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tools.audit.accepted import Secret

# These files have hashes, from pip-compile or from Docker's registry.
_GENERATED: Final = r"^requirements/.*\.txt$|\.lock$"


@dataclass(frozen=True, order=True)
class Suspect:
    path: str
    line: int
    kind: str

    def __str__(self) -> str:
        return f"secrets: {self.path}:{self.line}: {self.kind}"


def suspects(root: Path) -> list[Suspect]:
    """Suspected secrets in the files that git tracks. No secret is sent anywhere to try it."""
    command = [
        sys.executable, "-m", "detect_secrets", "scan", "--no-verify",
        "--exclude-files", _GENERATED,
    ]  # fmt: skip
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    return sorted(
        Suspect(path, each["line_number"], each["type"])
        for path, found in json.loads(done.stdout)["results"].items()
        for each in found
    )


def unexplained(found: Iterable[Suspect], accepted: Iterable[Secret]) -> Iterator[str]:
    """Suspects that are not accepted, and exceptions that apply to no suspect."""
    needed = set()
    for each in found:
        match = next((a for a in accepted if a.covers(each.path, each.kind)), None)
        if match is None:
            yield str(each)
        else:
            needed.add(match)
    for idle in (each for each in accepted if each not in needed):
        yield f"requirements/audit.yaml: {idle}: nothing there looks like a secret"

"""Finds known vulnerabilities of our dependencies with pip-audit, in OSV's database on the
network.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Final

from tools.audit.accepted import Vulnerability
from tools.audit.pinned import Pin, without_namesakes

OSV_URL: Final = "https://api.osv.dev/v1/query"
_SHOWN: Final = 200  # characters that are shown of a description
_ASK_S: Final = 15  # how long to wait for an answer of the database


class DatabaseUnreachable(Exception):
    """The database cannot be reached. The message says why."""


@dataclass(frozen=True)
class Found:
    package: str
    version: str
    ids: tuple[str, ...]  # the database's own id first, then those of other databases
    fixed_in: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        fix = f"fixed in {', '.join(self.fixed_in)}" if self.fixed_in else "no release fixes it"
        named = f"{self.package} {self.version}: {' '.join(self.ids)}"
        return f"vulnerabilities: {named} ({fix}): {self.text[:_SHOWN]}"


def vulnerabilities_of(pins: Iterable[Pin], folder: Path, osv_url: str = OSV_URL) -> list[Found]:
    """Query the database about every pin. Raises DatabaseUnreachable."""
    return [
        found
        for each in without_namesakes(pins)
        for dependency in _asked(each, folder, osv_url)
        for found in _found(dependency)
    ]


def _asked(pins: Iterable[Pin], folder: Path, osv_url: str) -> list[dict[str, Any]]:
    wanted = folder / "audited.txt"
    wanted.write_text("".join(f"{pin.name}=={pin.public_version}\n" for pin in pins))
    command = [
        sys.executable, "-m", "pip_audit", "--requirement", str(wanted), "--no-deps",
        "--disable-pip", "--strict", "--format", "json", "--progress-spinner", "off",
        "--vulnerability-service", "osv", "--osv-url", osv_url, "--timeout", str(_ASK_S),
        "--cache-dir", str(folder / "osv"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        dependencies: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        last = done.stderr.strip().rpartition("\n")[2]
        raise DatabaseUnreachable(f"{osv_url} gives no answer: {last[:_SHOWN]}") from None
    return dependencies


def _found(dependency: dict[str, Any]) -> Iterator[Found]:
    for each in dependency["vulns"]:
        yield Found(
            dependency["name"],
            dependency["version"],
            (each["id"], *each["aliases"]),
            tuple(each["fix_versions"]),
            each["description"],
        )


def unaccepted(
    found: Iterable[Found], accepted: Iterable[Vulnerability], today: date
) -> Iterator[str]:
    """Vulnerabilities that are not accepted today, and exceptions that apply to none of `found`."""
    needed = set()
    for each in found:
        match = next((a for a in accepted if a.package == each.package and a.id in each.ids), None)
        if match is None:
            yield str(each)
            continue
        needed.add(match)
        if today > match.until:
            yield f"{each} (it was accepted until {match.until})"
    yield from (
        f"requirements/audit.yaml: {each} is no longer found"
        for each in accepted
        if each not in needed
    )

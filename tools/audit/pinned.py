"""Reads the packages that requirements/*.txt pin, in the form that pip-compile writes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, order=True)
class Pin:
    name: str  # normalized as in PEP 503
    version: str
    hashes: tuple[str, ...]  # hashes of the files that may be installed

    @property
    def public_version(self) -> str:
        """The version in the package index, without the suffix of a particular build."""
        return public(self.version)

    def __str__(self) -> str:
        return f"{self.name} {self.version}"

    def requirement(self) -> str:
        return " ".join((f"{self.name}=={self.version}", *(f"--hash={h}" for h in self.hashes)))


def pins_in(files: Iterable[Path]) -> list[Pin]:
    """All pins of the files, each once. Two files may pin two versions of a package."""
    found: dict[tuple[str, str], Pin] = {}
    for file in files:
        for pin in _pins(file.read_text()):
            found.setdefault((pin.name, pin.version), pin)
    return sorted(found.values())


def _pins(text: str) -> Iterator[Pin]:
    for line in text.replace("\\\n", " ").splitlines():
        entry = line.partition(" #")[0].strip()
        if not entry or entry.startswith(("#", "-")):
            continue
        name, _, rest = entry.partition("==")
        version, *words = rest.split()
        hashes = [word.removeprefix("--hash=") for word in words if word.startswith("--hash=")]
        yield Pin(normalized(name), version, tuple(hashes))


def public(version: str) -> str:
    return version.partition("+")[0]


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def without_namesakes(pins: Iterable[Pin]) -> list[list[Pin]]:
    """The pins in as few lists as possible. A list has at most one version of a package."""
    lists: list[dict[str, Pin]] = []
    for pin in pins:
        place = next((each for each in lists if pin.name not in each), None)
        if place is None:
            place = {}
            lists.append(place)
        place[pin.name] = pin
    return [list(each.values()) for each in lists]

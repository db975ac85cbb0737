"""Reads the exceptions that an audit accepts, from requirements/audit.yaml.

Each exception has a reason. An exception that applies to nothing is a finding. So the file has no
outdated exceptions.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

import yaml

_FIELDS: Final[dict[str, frozenset[str]]] = {
    "licences": frozenset({"allowed", "names", "stated", "excepted"}),
    "vulnerabilities": frozenset({"id", "package", "until", "why"}),
    "secrets": frozenset({"files", "types", "why"}),
}


class BadAuditFile(Exception):
    """requirements/audit.yaml is malformed. The message names the field."""


@dataclass(frozen=True)
class Licences:
    allowed: frozenset[str]  # SPDX ids, with an SPDX exception if they have one
    names: dict[str, str]  # the name that packages give a licence -> SPDX expression
    stated: dict[str, str]  # package without usable metadata -> the SPDX expression in its files
    # pattern of package names, as in a shell -> why their licence is accepted
    excepted: dict[str, str]


@dataclass(frozen=True)
class Vulnerability:
    id: str
    package: str
    until: date  # the last day on which the vulnerability is accepted
    why: str

    def __str__(self) -> str:
        return f"vulnerabilities: {self.id} of {self.package}"


@dataclass(frozen=True)
class Secret:
    files: str  # a pattern of paths, as in a shell
    types: tuple[str, ...]  # the types of secrets, as detect-secrets names them
    why: str

    def covers(self, path: str, kind: str) -> bool:
        return kind in self.types and fnmatch(path, self.files)

    def __str__(self) -> str:
        return f"secrets: {self.files}"


@dataclass(frozen=True)
class Accepted:
    licences: Licences
    vulnerabilities: tuple[Vulnerability, ...]
    secrets: tuple[Secret, ...]


def read(path: Path) -> Accepted:
    """Read the file. Raises BadAuditFile or OSError."""
    try:
        document = yaml.safe_load(path.read_text())
    except yaml.YAMLError as exc:
        raise BadAuditFile(f"{path} is no YAML: {exc}") from exc
    if not isinstance(document, dict) or set(document) != set(_FIELDS):
        raise BadAuditFile(f"{path} must have exactly {', '.join(_FIELDS)}")
    licences = _fields(document["licences"], "licences", "licences")
    lists = {
        name: [
            _fields(each, name, f"{name}[{number}]")
            for number, each in enumerate(document[name] or [])
        ]
        for name in ("vulnerabilities", "secrets")
    }
    return Accepted(
        Licences(
            frozenset(licences["allowed"]),
            _words(licences["names"], "licences.names"),
            _words(licences["stated"], "licences.stated"),
            _words(licences["excepted"], "licences.excepted"),
        ),
        tuple(_vulnerability(each, n) for n, each in enumerate(lists["vulnerabilities"])),
        tuple(
            Secret(each["files"], tuple(each["types"]), each["why"]) for each in lists["secrets"]
        ),
    )


def _vulnerability(found: dict[str, Any], number: int) -> Vulnerability:
    until = found["until"]
    if not isinstance(until, date):
        raise BadAuditFile(f"vulnerabilities[{number}].until must be a date")
    return Vulnerability(found["id"], found["package"], until, found["why"])


def _fields(found: Any, kind: str, where: str) -> dict[str, Any]:
    """The fields of `found`, which must be exactly the fields of this kind, each with a value."""
    if not isinstance(found, dict):
        raise BadAuditFile(f"{where} must have the fields {', '.join(sorted(_FIELDS[kind]))}")
    for name in sorted(_FIELDS[kind] ^ set(found)):
        raise BadAuditFile(f"{where}.{name} is {'unknown' if name in found else 'missing'}")
    for name in ("why", "files", "id", "package"):
        if name in found and not (isinstance(found[name], str) and found[name].strip()):
            raise BadAuditFile(f"{where}.{name} must be text")
    for name in ("allowed", "types"):
        if name in found and not isinstance(found[name], list):
            raise BadAuditFile(f"{where}.{name} must be a list")
    return found


def _words(found: Any, where: str) -> dict[str, str]:
    if not isinstance(found, dict):
        raise BadAuditFile(f"{where} must be a mapping")
    for name, text in found.items():
        if not isinstance(text, str) or not text.strip():
            raise BadAuditFile(f"{where}.{name} must be text")
    return found

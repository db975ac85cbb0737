"""Determines the licence of each dependency, and whether we may use it.

A licence comes from the package's own metadata. `tools.audit.metadata` reads it from the installed
package, or asks pip. It is an SPDX expression, or a name or classifier that requirements/audit.yaml
translates.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Final

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

from tools.audit.accepted import Licences
from tools.audit.pinned import Pin

_CLASSIFIER: Final = "License :: "
_VAGUE: Final = frozenset({"License :: OSI Approved", "License :: DFSG approved"})
_TOKEN: Final = re.compile(r"\(|\)|[^\s()]+(?: WITH [^\s()]+)?")


@dataclass(frozen=True)
class Metadata:
    """The fields about the licence in a package's metadata."""

    expression: str = ""
    licence: str = ""
    classifiers: tuple[str, ...] = ()


def expression_of(pin: Pin, metadata: Metadata, known: Licences) -> str:
    """The SPDX expression of a package's licence; empty if the metadata has none."""
    if pin.name in known.stated:
        return known.stated[pin.name]
    said = [metadata.expression, " ".join(metadata.licence.split())]
    said += [each for each in metadata.classifiers if each not in _VAGUE]
    for each in said:
        if found := _canonical(known.names.get(each.removeprefix(_CLASSIFIER), each)):
            return found
    return ""


def _canonical(expression: str) -> str:
    try:
        return str(canonicalize_license_expression(expression))
    except InvalidLicenseExpression:
        return ""


def is_allowed(expression: str, allowed: frozenset[str]) -> bool:
    """Whether a user can comply with allowed licences alone. AND binds more strongly than OR."""
    return _Choice(_TOKEN.findall(expression), allowed).any()


class _Choice:
    def __init__(self, tokens: list[str], allowed: frozenset[str]) -> None:
        self._tokens, self._allowed = tokens, allowed

    def any(self) -> bool:
        found = [self._all()]
        while self._take("OR"):
            found.append(self._all())
        return any(found)

    def _all(self) -> bool:
        found = [self._one()]
        while self._take("AND"):
            found.append(self._one())
        return all(found)

    def _one(self) -> bool:
        if self._take("("):
            found = self.any()
            self._take(")")
            return found
        return self._tokens.pop(0) in self._allowed

    def _take(self, token: str) -> bool:
        if not self._tokens or self._tokens[0] != token:
            return False
        self._tokens.pop(0)
        return True


def forbidden(
    expressions: Mapping[Pin, str], known: Licences, *, is_whole: bool = True
) -> Iterator[str]:
    """Packages whose licence is unknown or not allowed.

    If `is_whole`, `expressions` must have all packages. Then exceptions that no package needs are
    findings as well.
    """
    needed = set()
    for pin, expression in sorted(expressions.items()):
        if expression and is_allowed(expression, known.allowed):
            continue
        reasons = [pattern for pattern in known.excepted if fnmatch(pin.name, pattern)]
        needed.update(reasons)
        if not reasons:
            yield f"licences: {pin} is under {expression or 'a licence that its metadata hides'}"
    if is_whole:
        yield from _idle("excepted", set(known.excepted) - needed)
        yield from _idle("stated", set(known.stated) - {pin.name for pin in expressions})


def _idle(field: str, names: Iterable[str]) -> Iterator[str]:
    for name in sorted(names):
        yield f"requirements/audit.yaml: licences.{field}.{name} is needed by no package"

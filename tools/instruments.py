"""Finds all instruments (metrics) in the source code: their kind, meaning, and name in
Prometheus.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from opentelemetry.exporter.prometheus._mapping import (
    map_unit,
    sanitize_attribute,
    sanitize_full_name,
)

from pdmesh.telemetry import names
from pdmesh.telemetry.labels import labels_of

ROOTS: Final = ("libs/pdmesh", "services")
# The modules with the names and labels of instruments. They create no instruments.
_TABLES: Final = (Path("libs/pdmesh/telemetry/names.py"), Path("libs/pdmesh/telemetry/labels.py"))
# The functions that create instruments. A tuple is a row in a list of gauges.
_KINDS: Final = {
    "counter": "counter",
    "total": "counter",
    "_engine_total": "counter",
    "gauge": "gauge",
    "_gauge": "gauge",
    "histogram": "histogram",
}
_DEFAULT_UNITS: Final = {"histogram": "s"}


@dataclass(frozen=True, slots=True)
class Instrument:
    """An instrument.

    `constant` is the name of its constant in `names.py`. `unit` is an OpenTelemetry unit, such as s
    or By.
    """

    constant: str
    kind: str
    help: str
    unit: str

    @property
    def name(self) -> str:
        return str(getattr(names, self.constant))

    @property
    def family(self) -> str:
        """Its name on a page of /metrics, with the unit, but without the suffixes of its series."""
        name, unit = sanitize_full_name(self.name), map_unit(self.unit)
        return name if not unit or name.endswith(f"_{unit}") else f"{name}_{unit}"

    @property
    def series(self) -> tuple[str, ...]:
        """The names that a query may use."""
        if self.kind == "counter":
            return (f"{self.family}_total",)
        if self.kind == "histogram":
            return tuple(f"{self.family}_{each}" for each in ("bucket", "count", "sum"))
        return (self.family,)

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels in Prometheus' spelling."""
        return tuple(map(sanitize_attribute, labels_of(self.name)))


def sources(root: Path = Path()) -> Mapping[Path, str]:
    return {
        path: path.read_text()
        for folder in ROOTS
        for path in sorted((root / folder).rglob("*.py"))
        if path.relative_to(root) not in _TABLES
    }


def instruments(source: str) -> Iterator[Instrument]:
    """The instruments that a module creates.

    A module calls `counter(names.X, "help", ...)`, or has a tuple of these arguments in a list of
    gauges.
    """
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(
                func=ast.Attribute(attr=maker) | ast.Name(id=maker),
                args=[
                    ast.Attribute(value=ast.Name(id="names"), attr=constant),
                    ast.Constant(value=str(help_text)),
                    *rest,
                ],
                keywords=keywords,
            ) if maker in _KINDS:
                named = [each.value for each in keywords if each.arg == "unit"]
                kind = _KINDS[maker]
                yield Instrument(constant, kind, help_text, _unit(kind, [*rest, *named]))
            case ast.Tuple(
                elts=[
                    ast.Attribute(value=ast.Name(id="names"), attr=constant),
                    ast.Constant(value=str(help_text)),
                    *rest,
                ]
            ):
                yield Instrument(constant, "gauge", help_text, _unit("gauge", rest))


def _unit(kind: str, arguments: list[ast.expr]) -> str:
    """The unit: the first text among the arguments after the help, or the kind's default."""
    for each in arguments:
        if isinstance(each, ast.Constant) and isinstance(each.value, str):
            return each.value
    return _DEFAULT_UNITS.get(kind, "1")


def all_instruments(root: Path = Path()) -> dict[str, Instrument]:
    """All instruments by name.

    Raises ValueError if one name has two kinds or two units.
    """
    found: dict[str, Instrument] = {}
    for text in sources(root).values():
        for each in instruments(text):
            other = found.setdefault(each.name, each)
            if (other.kind, other.unit) != (each.kind, each.unit):
                raise ValueError(f"{each.name} is made as {other} and as {each}")
    return found

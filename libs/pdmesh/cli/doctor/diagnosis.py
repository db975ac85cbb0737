"""The findings of `pdmesh doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Grade(StrEnum):
    OK = "ok"
    WARNING = "warning"  # the mesh works, but not as well as it could
    PROBLEM = "problem"  # a part of the mesh does not work


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One finding. `remedy` tells the user what to do. It is empty if nothing needs to be done."""

    subject: str
    grade: Grade
    text: str
    remedy: str = ""


def ok(subject: str, text: str) -> Diagnosis:
    return Diagnosis(subject, Grade.OK, text)


def warning(subject: str, text: str, remedy: str) -> Diagnosis:
    return Diagnosis(subject, Grade.WARNING, text, remedy)


def problem(subject: str, text: str, remedy: str) -> Diagnosis:
    return Diagnosis(subject, Grade.PROBLEM, text, remedy)

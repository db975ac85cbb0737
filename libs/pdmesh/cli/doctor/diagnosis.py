"""What an examination found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Grade(StrEnum):
    OK = "ok"
    WARNING = "warning"  # it runs, but not as well as it could
    PROBLEM = "problem"  # something does not run


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """`text` says what was found; `remedy` says what to do about it, and is empty for OK."""

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

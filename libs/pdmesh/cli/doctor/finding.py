"""What an examination found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    OK = "ok"
    WARNING = "warning"  # it runs, but not as well as it could
    PROBLEM = "problem"  # something does not run


@dataclass(frozen=True, slots=True)
class Finding:
    """`text` says what is so; `remedy` says what to do, empty if there is nothing to do."""

    subject: str
    verdict: Verdict
    text: str
    remedy: str = ""


def ok(subject: str, text: str) -> Finding:
    return Finding(subject, Verdict.OK, text)


def warning(subject: str, text: str, remedy: str) -> Finding:
    return Finding(subject, Verdict.WARNING, text, remedy)


def problem(subject: str, text: str, remedy: str) -> Finding:
    return Finding(subject, Verdict.PROBLEM, text, remedy)

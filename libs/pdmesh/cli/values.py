"""Parses the values of command-line options. Each error says in one line what is allowed."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

MAX_SIZES: Final = 8  # most numbers in `--tp`; a plan tries every pair of them
_MAX_DURATION_S: Final = 1000 * 86_400  # a coarse bound; the leader has the real one


def duration(text: str) -> int:
    """Parse a duration such as 30m to seconds. A number without a unit means seconds."""
    number, unit = text[:-1], text[-1:]
    if unit.isdigit():
        number, unit = text, "s"
    seconds = {"s": 1, "m": 60, "h": 3600, "d": 86_400}.get(unit)
    if seconds is None or not number.isdecimal():
        raise argparse.ArgumentTypeError("must be a whole number and s, m, h or d, such as 30m")
    return _whole_number(number, _MAX_DURATION_S // seconds) * seconds


def assignment(text: str) -> tuple[str, str]:
    name, found, value = text.partition("=")
    if not (name and found):
        raise argparse.ArgumentTypeError("must be NAME=VALUE")
    return name, value


def names(text: str) -> tuple[str, ...]:
    """Parse names that are separated by commas."""
    return tuple(name for name in text.split(",") if name)


def positive(text: str) -> float:
    value = _number(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("must be a positive number")
    return value


def positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError("must be a positive whole number")
    return int(text)


def _number(text: str) -> float:
    """The number, or NaN if the text is not a number. The callers' bounds refuse NaN."""
    try:
        return float(text)
    except ValueError:
        return float("nan")


def share(text: str) -> float:
    value = _number(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError("must be more than 0 and less than 1")
    return value


def share_or_none(text: str) -> float:
    value = _number(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError("must be at least 0 and less than 1")
    return value


def sizes(text: str) -> tuple[int, ...]:
    """Parse at most `MAX_SIZES` different numbers from 1 to 64, and sort them."""
    found = {one_or_more(part) for part in text.split(",")}
    if len(found) > MAX_SIZES:
        raise argparse.ArgumentTypeError(f"{len(found)} numbers: the most allowed is {MAX_SIZES}")
    return tuple(sorted(found))


def count(text: str) -> int:
    return _whole_number(text, 64)


def one_or_more(text: str) -> int:
    return _whole_number(text, 64, minimum=1)


def port(text: str) -> int:
    return _whole_number(text, 65535)


def version(text: str) -> int:
    return _whole_number(text, 2**63 - 1)


def absolute_path(text: str) -> str:
    return str(Path(text).absolute())


def _whole_number(text: str, maximum: int, *, minimum: int = 0) -> int:
    if not text.isdecimal() or not minimum <= int(text) <= maximum:
        raise argparse.ArgumentTypeError(f"must be {minimum} to {maximum}")
    return int(text)

"""Decides when a cron expression fires next in a time zone.

The five fields are minute, hour, day of month, month and day of week. A field is `*`, numbers,
ranges `a-b` and steps `/n`, joined by commas. Sunday is 0 or 7. As in cron, if both day fields are
restricted, a day matches if it matches either field.

A local time that the clock skips in spring fires later, by as much as the clock jumped. A time that
the clock repeats in autumn fires only the first time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from typing import Final

_FIELDS: Final = (
    ("minute", 0, 59),
    ("hour", 0, 23),
    ("day of month", 1, 31),
    ("month", 1, 12),
    ("day of week", 0, 7),
)
# The next 29 February is within eight years. The next 29 February on a given weekday may be 40
# years away, which counts as never.
_MAX_DAYS: Final = 366 * 8 + 2


@dataclass(frozen=True, slots=True)
class Cron:
    text: str
    minutes: tuple[int, ...]
    hours: tuple[int, ...]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]  # Monday is 0
    is_any_day: bool
    is_any_weekday: bool

    @classmethod
    def parse(cls, text: str) -> Cron:
        """Raises ValueError with the reason."""
        fields = text.split()
        if len(fields) != len(_FIELDS):
            raise ValueError(f"{text!r}: a schedule has five fields, not {len(fields)}")
        minutes, hours, days, months, weekdays = (
            _values(field, *bounds) for field, bounds in zip(fields, _FIELDS, strict=True)
        )
        cron = cls(
            text,
            tuple(sorted(minutes)),
            tuple(sorted(hours)),
            days,
            months,
            frozenset((day - 1) % 7 for day in weekdays),
            fields[2].startswith("*"),
            fields[4].startswith("*"),
        )
        if not cron.is_any_day and cron.is_any_weekday and not _is_possible(days, months):
            raise ValueError(f"{text!r}: no such day")
        return cron

    def next_after(self, now: float, zone: tzinfo = UTC) -> float | None:
        """The first time after `now`, in unix seconds. None means that there is none within eight
        years.
        """
        first = datetime.fromtimestamp(now, zone).date()
        for offset in range(-1, _MAX_DAYS):  # yesterday's skipped time may fire today
            day = first + timedelta(days=offset)
            if self._is_day(day):
                for at in self._times(day, zone):
                    if at > now:
                        return at
        return None

    def _times(self, day: date, zone: tzinfo) -> Iterator[float]:
        at = (
            datetime.combine(day, time(hour, minute), zone).timestamp()
            for hour in self.hours
            for minute in self.minutes
        )
        return iter(sorted(set(at)))

    def _is_day(self, day: date) -> bool:
        if day.month not in self.months:
            return False
        is_day, is_weekday = day.day in self.days, day.weekday() in self.weekdays
        if self.is_any_day or self.is_any_weekday:
            return is_day and is_weekday
        return is_day or is_weekday


def _is_possible(days: frozenset[int], months: frozenset[int]) -> bool:
    longest = {2: 29, 4: 30, 6: 30, 9: 30, 11: 30}
    return any(min(days) <= longest.get(month, 31) for month in months)


def _values(text: str, name: str, low: int, high: int) -> frozenset[int]:
    values: set[int] = set()
    for part in text.split(","):
        span, _, step_text = part.partition("/")
        step = _number(step_text, name, 1, high) if "/" in part else 1
        if span == "*":
            first, last = low, high
        elif "-" in span:
            first_text, _, last_text = span.partition("-")
            first, last = _number(first_text, name, low, high), _number(last_text, name, low, high)
        else:
            first = _number(span, name, low, high)
            last = high if "/" in part else first
        if first > last:
            raise ValueError(f"{name} {part!r}: {first} is after {last}")
        values.update(range(first, last + 1, step))
    return frozenset(values)


def _number(text: str, name: str, low: int, high: int) -> int:
    if not text.isascii() or not text.isdigit() or not low <= int(text) <= high:
        raise ValueError(f"{name} {text!r}: must be a number from {low} to {high}")
    return int(text)

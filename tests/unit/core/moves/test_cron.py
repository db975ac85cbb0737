"""Tests when a cron expression fires next, and which expressions are refused."""

from __future__ import annotations

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.core.moves.cron import Cron

DAY = 86_400.0

MIDNIGHT = datetime(2026, 11, 21, tzinfo=UTC).timestamp()  # 21 November 2026 is a Saturday


def at(text: str, start: float = MIDNIGHT, zone: str = "UTC", count: int = 1) -> list[str]:
    cron, times, now = Cron.parse(text), [], start
    for _ in range(count):
        found = cron.next_after(now, ZoneInfo(zone))
        assert found is not None
        now = found
        times.append(datetime.fromtimestamp(now, ZoneInfo(zone)).strftime("%a %m-%d %H:%M"))
    return times


@pytest.mark.req("S21")
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0 8 * * *", ["Sat 11-21 08:00", "Sun 11-22 08:00"]),
        ("30 8 * * 1-5", ["Mon 11-23 08:30", "Tue 11-24 08:30"]),
        ("*/20 23 * * 7", ["Sun 11-22 23:00", "Sun 11-22 23:20"]),
        ("0 0 1,15 * *", ["Tue 12-01 00:00", "Tue 12-15 00:00"]),
        ("0 12 13 * 5", ["Fri 11-27 12:00", "Fri 12-04 12:00"]),  # on the 13th, or on any Friday
        ("0 0 29 2 *", ["Tue 02-29 00:00"]),
    ],
)
def test_an_expression_fires_when_cron_fires(text: str, expected: list[str]) -> None:
    assert at(text, count=len(expected)) == expected


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("0 8 * *", "five fields"),
        ("60 8 * * *", "minute '60'"),
        ("0 8-5 * * *", "8 is after 5"),
        ("0 8 * * mon", "day of week 'mon'"),
        ("0 8 */0 * *", "day of month '0'"),
        ("0 0 30 2 *", "no such day"),
        ("0 ٨ * * *", "hour"),
    ],
)
def test_the_refusal_of_a_wrong_expression_names_its_field(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Cron.parse(text)


def test_a_skipped_local_time_fires_once_later_and_a_repeated_one_once() -> None:
    """In Berlin in 2026, 02:30 does not exist on 29 March and comes twice on 25 October."""
    spring = datetime(2026, 3, 28, 12, tzinfo=UTC).timestamp()
    assert at("30 2 * * *", spring, "Europe/Berlin", 2) == ["Sun 03-29 03:30", "Mon 03-30 02:30"]
    autumn = datetime(2026, 10, 24, 12, tzinfo=UTC).timestamp()
    assert at("30 2 * * *", autumn, "Europe/Berlin", 2) == ["Sun 10-25 02:30", "Mon 10-26 02:30"]


@given(
    minute=st.integers(0, 59), hour=st.integers(0, 23), weekday=st.integers(0, 6),
    start=st.floats(0, 4e9),
)  # fmt: skip
def test_the_next_time_is_later_and_matches(
    minute: int, hour: int, weekday: int, start: float
) -> None:
    found = Cron.parse(f"{minute} {hour} * * {weekday}").next_after(start)
    assert found is not None
    assert start < found <= start + 7 * DAY
    when = datetime.fromtimestamp(found, UTC)
    assert (when.minute, when.hour, when.isoweekday() % 7) == (minute, hour, weekday)

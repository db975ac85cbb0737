"""The number of users grows by half until a request fails. The last good number is the result."""

from __future__ import annotations

import pytest

from loadtests.traffic.until_failure import Ramp


@pytest.mark.req("S65")
def test_users_grow_until_the_first_failure_and_the_last_good_level_counts() -> None:
    ramp = Ramp(2)
    seen = []
    for success, rate in ((1.0, 5.0), (1.0, 8.0), (1.0, 11.0), (0.99, 12.0), (1.0, 7.0)):
        seen.append(ramp.users)
        ramp.after(success, rate)
    assert seen == [2, 3, 4, 6, 4]
    assert (ramp.best, ramp.best_rate, ramp.has_failed) == (4, 11.0, True)


def test_a_scenario_that_fails_at_once_has_no_good_level() -> None:
    ramp = Ramp(2)
    ramp.after(0.5, 1.0)
    assert (ramp.best, ramp.users) == (0, 1)

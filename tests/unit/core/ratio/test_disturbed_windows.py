"""A window of measurements says nothing about the ratio if its scenario was disturbed."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from pdmesh.core.ratio.disturbed_windows import DisturbedWindows

SERVING = {"chat": [True, True], "code": [True]}


@pytest.mark.req("S30", "S32")
@pytest.mark.parametrize(
    ("chat", "moving", "upgrading"),
    [([True, False], (), ()), ([True, True], {"chat"}, ()), ([True, True], (), {"chat"})],
)
def test_one_disturbed_moment_spoils_its_own_scenarios_window_and_no_other(
    chat: list[bool], moving: Collection[str], upgrading: Collection[str]
) -> None:
    windows = DisturbedWindows()
    windows.see(SERVING, (), ())
    windows.see({**SERVING, "chat": chat}, moving, upgrading)
    windows.see(SERVING, (), ())
    assert windows.close() == {"chat"}
    windows.see(SERVING, (), ())
    assert windows.close() == set()
    windows.see({}, (), {"chat"})  # the scenario's first group is not there yet
    windows.see(SERVING, (), ())
    assert windows.close() == {"chat"}

"""A window holds the means of the requests that ended in it.

Only scenarios that have groups get windows.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdmesh.core.ratio.bottleneck import Window
from pdmesh.core.ratio.scenario_stats import RequestSample
from pdmesh.core.ratio.scenario_windows import ScenarioWindows

REQUEST = RequestSample("chat", 1000, 250, 11, queue_s=0.5, ttft_s=0.75, e2e_s=1.75, transfer_s=0.1)


@pytest.mark.req("S29")
def test_a_window_has_the_means_of_what_ended_in_it_and_the_next_begins_anew() -> None:
    windows = ScenarioWindows()
    windows.serve(["chat"])
    windows.finished(REQUEST)
    windows.finished(replace(REQUEST, e2e_s=3.75))
    for _ in range(2):
        windows.failed("chat")
    closed = windows.close("chat", 0.4, None, span_s=10.0)
    assert closed == Window(2, 0.5, 0.25, 2.0, 0.5, 0.4, None, 0.2)
    windows.failed("chat")
    assert windows.close("chat", 0.4, None, 10.0) is None  # no request was answered in this window


def test_only_scenarios_with_groups_have_windows() -> None:
    windows = ScenarioWindows()
    for name in ("chat", "invented"):
        windows.finished(replace(REQUEST, scenario=name))
    windows.serve(["chat"])
    windows.finished(REQUEST)
    windows.finished(replace(REQUEST, scenario="invented"))
    windows.serve(["chat", "code"])
    assert windows.close("invented", None, None, 10.0) is None
    chat = windows.close("chat", None, None, 10.0)
    assert chat is not None
    assert chat.num_requests == 1

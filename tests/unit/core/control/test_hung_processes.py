"""A process that has not answered for too long is killed."""

from __future__ import annotations

import pytest

from pdmesh.core.control.hung_processes import SILENCE_S, HungProcesses


@pytest.mark.req("S74")
def test_a_process_is_killed_once_it_has_not_answered_for_too_long() -> None:
    silent = HungProcesses()
    assert not silent.probed("decode-0", 100.0, is_live=False)
    assert not silent.probed("decode-0", 100.0 + SILENCE_S, is_live=False)
    assert silent.probed("decode-0", 100.5 + SILENCE_S, is_live=False)
    assert not silent.probed("decode-0", 101.0 + SILENCE_S, is_live=False), "its successor starts"


@pytest.mark.req("S74")
def test_one_answer_ends_the_silence_of_that_process_alone() -> None:
    silent = HungProcesses()
    for name in ("decode-0", "prefill-0"):
        silent.probed(name, 100.0, is_live=False)
    silent.probed("decode-0", 110.0, is_live=True)
    later = 101.0 + SILENCE_S
    assert not silent.probed("decode-0", later, is_live=False)
    assert silent.probed("prefill-0", later, is_live=False)

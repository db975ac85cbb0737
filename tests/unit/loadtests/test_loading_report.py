"""The report of the loading bench: ratios within a round, required values, and bytes read."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from loadtests.loading.__main__ import HEAD, LOCAL, OVERLAP, SLOW, Comparison, Found, rows, saved
from loadtests.loading.buffers import BufferRound
from loadtests.loading.ranks import Load
from loadtests.loading.storage import SharedRate, SlowDisk, shared_times, write_model
from pdmesh.core.loading.weight_files import check_complete
from pdmesh.engine.vllm.loading.window_reader import read_header


def found(comparison: Comparison, baseline: list[float], ours: list[float]) -> Found:
    loads = [Load(comparison.baseline, seconds, 200, 0) for seconds in baseline]
    loads += [Load(comparison.ours, seconds, 100, 1) for seconds in ours]
    return Found(comparison, 2, 100, loads)


def test_a_ratio_is_that_of_the_two_loads_of_a_round() -> None:
    assert found(SLOW, [2.0, 9.0], [1.0, 3.0]).ratios == [2.0, 3.0]


@pytest.mark.parametrize(
    ("comparison", "baseline", "is_met"),
    [(SLOW, 1.4, True), (SLOW, 1.39, False), (OVERLAP, 1.25, True), (OVERLAP, 1.24, False)],
)
def test_a_bar_is_met_by_the_median(comparison: Comparison, baseline: float, is_met: bool) -> None:
    each = found(comparison, [0.5, baseline, 9.0], [1.0, 1.0, 1.0])
    assert ("**not met**" not in each.bar) == is_met


def test_a_row_has_what_the_head_says() -> None:
    (row,) = rows([found(SLOW, [3.0], [1.0])])
    told = dict(zip(HEAD, row, strict=True))
    assert told["ratio"] == "3.00 (3.00..3.00)"
    assert told["bytes read, of the model"] == "2.00, 1.00"
    assert told["buffers"] == "1"
    assert rows([found(LOCAL, [3.0], [1.0])])[0][HEAD.index("required")] == ""


def test_the_saving_is_scaled_to_two_gibibytes() -> None:
    assert "0.60 (0.60..0.60) s saved" in saved([BufferRound(1.0, 1.3)], 1 << 30)


def test_the_model_is_whole_and_a_disk_counts_what_is_read(tmp_path: Path) -> None:
    index = write_model(tmp_path, num_layers=0)
    disk = SlowDisk(SharedRate(0.0, shared_times()))
    headers = [read_header(tmp_path / file, disk.open) for file in sorted(set(index.values()))]
    check_complete(headers, index)
    assert disk.num_bytes == sum(header.data_begin for header in headers)


def test_processes_share_the_rate_and_idle_time_is_not_made_up_for() -> None:
    times = shared_times()
    times[0] -= 1000  # as if the processes had been idle for 1,000 s
    times[1] -= 1000
    began = time.monotonic()
    SharedRate(1e6, times).take(10_000)
    assert times[0] >= began + 0.01
    first = times[0]
    SharedRate(1e6, times).take(20_000)
    assert times[0] - first >= 0.02 - 1e-9
    before = times[0]
    SharedRate(0.0, times).take(1 << 40)
    assert times[0] == before


def test_a_sleep_that_took_too_long_is_made_up_for() -> None:
    times = shared_times()
    SharedRate(1e6, times).take(1000)
    times[0] -= 50.0  # as if the previous call had returned 50 s too late
    late = times[0]
    SharedRate(1e6, times).take(1000)
    assert times[0] < late + 40

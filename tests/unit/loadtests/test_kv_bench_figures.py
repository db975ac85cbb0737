"""The figures of the KV benchmark: the numbers in a ratio, and when a required value is met."""

from __future__ import annotations

import csv
from dataclasses import fields
from pathlib import Path

import pytest

from loadtests.kv_bench import cases
from loadtests.kv_bench.report.figures import (
    BARS,
    Figures,
    Spread,
    write_csv,
)
from loadtests.kv_bench.report.page import markdown
from loadtests.kv_bench.rounds import Row, repeats_of

MIB = 1 << 20


def row(number: int, mode: str, total_ms: float, num_bytes: int = 16 * MIB, **more: float) -> Row:
    return Row(number, "tcp", num_bytes, mode, total_ms, **more)


def test_a_ratio_is_taken_within_a_round() -> None:
    """In round 2 the machine was four times as slow. The ratio is one half in both rounds."""
    rows = [row(1, cases.CHUNKED, 5), row(1, cases.BLOCKS_ACKED, 10)]
    rows += [row(2, cases.CHUNKED, 20), row(2, cases.BLOCKS_ACKED, 40)]
    assert Figures(rows).ratio("tcp", 16 * MIB, cases.CHUNKED, [cases.BLOCKS_ACKED]) == Spread(
        0.5, 0.5, 0.5
    )


def test_a_round_counts_with_the_median_of_its_measurements() -> None:
    rows = [row(1, cases.CHUNKED, ms) for ms in (1, 2, 90)] + [row(2, cases.CHUNKED, 4)]
    assert Figures(rows).spread("tcp", 16 * MIB, cases.CHUNKED) == Spread(3, 2, 4)


def test_the_wire_is_compared_with_both_waiting_modes_of_perftest() -> None:
    rows = [row(1, cases.WIRE_EMPTY, 10), row(1, "perftest_poll", 9), row(1, "perftest_sleep", 12)]
    rates = [Figures(rows).perftest_rate("tcp", 16 * MIB, wait) for wait in ("poll", "sleep")]
    assert [rate and rate.median for rate in rates] == pytest.approx([0.9, 1.2])


def test_the_wire_has_no_bar_below_16_mib() -> None:
    rows = [row(1, cases.WIRE_EMPTY, 10, MIB), row(1, "perftest_poll", 9, MIB)]
    wire = next(bar for bar in BARS if "wire" in bar.name)
    assert wire.value(Figures(rows), "tcp", MIB) is None
    assert not wire.is_met(0.94)
    assert wire.is_met(0.95)


def test_an_unmet_bar_is_called_unmet() -> None:
    rows = [row(1, cases.CHUNKED, 6), row(1, cases.BLOCKS_ACKED, 10)]
    line = next(
        text
        for text in markdown(Figures(rows), "command").splitlines()
        if text.startswith(f"| {BARS[0].name}")
    )
    assert "0.60" in line
    assert "unmet" in line


def test_the_csv_has_every_field_of_a_row(tmp_path: Path) -> None:
    write_csv([row(1, cases.LAYERS, 1.5, visible_ms=0.25)], tmp_path / "out.csv")
    (read,) = csv.DictReader((tmp_path / "out.csv").read_text().splitlines())
    assert list(read) == [field.name for field in fields(Row)]
    assert (read["mode"], read["total_ms"], read["visible_ms"]) == (cases.LAYERS, "1.5", "0.25")
    assert read["wire_ms"] == ""


def test_the_model_computes_a_token_in_its_time() -> None:
    seconds = cases.layer_compute_s(64 * MIB) * cases.NUM_LAYERS
    assert seconds * cases.TOKENS_PER_S == pytest.approx(64 * MIB / cases.TOKEN_BYTES)


def test_a_short_prompt_takes_as_long_as_the_weights() -> None:
    assert cases.layer_compute_s(MIB) * cases.NUM_LAYERS == pytest.approx(cases.WEIGHTS_S)


def test_a_size_that_is_not_a_whole_number_of_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="whole blocks"):
        cases.layout_of(MIB + 1)


def test_the_largest_payload_is_sent_once_at_least() -> None:
    assert repeats_of(1 << 40) == 1
    assert repeats_of(1) == 32

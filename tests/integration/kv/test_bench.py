"""Runs `make bench NAME=kv` at its smallest size, with two real processes over UCX, and checks the
files that it writes.
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import pytest

from loadtests.harness.generator import ROOT
from loadtests.kv_bench import cases
from loadtests.kv_bench.report.figures import BAR_TOTAL
from loadtests.kv_bench.rounds import Row


@pytest.mark.req("S48", "S49", "S50")
def test_the_bench_moves_the_right_bytes_in_every_mode_and_writes_them_down(tmp_path: Path) -> None:
    """The benchmark compares the blocks at both ends in its first round, and fails if they
    differ.
    """
    arguments = ["--sizes", "1", "--rounds", "1", "--transports", "tcp", "--no-perftest"]
    table = run("loadtests.kv_bench", arguments, tmp_path)
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert list(rows[0]) == [field.name for field in fields(Row)]
    assert {row["mode"] for row in rows} == {*cases.MODES, "memcpy"}
    assert all(float(row["total_ms"]) > 0 for row in rows)
    for name in ("gather_ms", "wire_ms", "scatter_ms"):
        assert all(float(row[name]) > 0 for row in rows if row["mode"] == cases.WHOLE)
    assert table.with_suffix(".md").read_text().startswith("# KV transfer")
    assert table.with_suffix(".png").stat().st_size > 10_000


@pytest.mark.req("S59", "S60")
def test_larger_blocks_use_more_of_the_wire_and_block_free_transfer_is_fastest(
    tmp_path: Path,
) -> None:
    """All numbers are from a single round. That is enough because blocks of 4 KiB and of 512 KiB
    differ by a factor of ten or more, and SmolLM2 is far below its bar.
    """
    arguments = ["--rounds", "1", "--transports", "tcp"]
    table = run("loadtests.kv_bench.blocks", arguments, tmp_path)
    ms = {
        (int(row["num_layers"]), int(row["block_bytes"]), row["mode"]): float(row["total_ms"])
        for row in csv.DictReader(table.read_text().splitlines())
    }
    assert ms[16, 512 << 10, cases.BLOCKS_ACKED] < ms[16, 4 << 10, cases.BLOCKS_ACKED] / 3
    smollm2 = 30, 12 << 10
    assert ms[*smollm2, cases.CHUNKED] <= BAR_TOTAL * ms[*smollm2, cases.BLOCKS_ACKED]


def run(module: str, arguments: Sequence[str], out: Path) -> Path:
    """Run the benchmark and return the path of the table that it wrote."""
    subprocess.run(
        [sys.executable, "-m", module, *arguments, "--out", str(out)],
        check=True,
        timeout=280,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'libs'}:{ROOT}"},
    )
    (table,) = out.glob("*.csv")
    return table

"""`make bench-kv` at its smallest size: two real processes over UCX, and what it writes."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from loadtests.generator import ROOT
from loadtests.kv_bench import cases
from loadtests.kv_bench.rounds import Row


@pytest.mark.req("S48", "S49", "S50", "S60")
def test_the_bench_moves_the_right_bytes_in_every_mode_and_writes_them_down(tmp_path: Path) -> None:
    """Its first round compares the blocks at both ends; the run fails if they differ."""
    arguments = ["--sizes", "1", "--rounds", "1", "--transports", "tcp", "--no-perftest", "--out"]
    subprocess.run(
        [sys.executable, "-m", "loadtests.kv_bench", *arguments, str(tmp_path)],
        check=True,
        timeout=100,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'libs'}:{ROOT}"},
    )
    (table,) = tmp_path.glob("*.csv")
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert list(rows[0]) == [field.name for field in fields(Row)]
    assert {row["mode"] for row in rows} == {*cases.MODES, "memcpy"}
    assert all(float(row["total_ms"]) > 0 for row in rows)
    for name in ("gather_ms", "wire_ms", "scatter_ms"):
        assert all(float(row[name]) > 0 for row in rows if row["mode"] == cases.WHOLE)
    assert table.with_suffix(".md").read_text().startswith("# KV transfer")
    assert table.with_suffix(".png").stat().st_size > 10_000

"""The check of the KV path on a GPU, run without a GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from loadtests.gpu_check import __main__ as gpu_check
from loadtests.gpu_check.finding import Finding


def test_without_a_gpu_the_check_says_so_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["gpu_check"])
    assert gpu_check.main() == 2
    assert "no GPU here" in capsys.readouterr().err


def test_a_section_that_raises_counts_as_failed() -> None:
    def breaks() -> list[Finding]:
        raise RuntimeError("out of memory")

    (found,) = gpu_check.carefully(breaks)
    assert found.is_right is False
    assert "out of memory" in found.page()


def test_the_check_of_checksums_runs_without_a_gpu_too() -> None:
    from loadtests.gpu_check import checksums

    found = checksums.check("cpu", (1, 7, 4096, 1 << 20))
    assert found.is_right
    assert [row["MiB"] for row in found.rows] == [1]


def test_a_record_shows_its_verdict_and_its_rows() -> None:
    page = Finding("Operators", "Two cases.", True, [{"MiB": 4, "ms": "0.1"}]).page()
    assert page.splitlines() == [
        "## Operators: holds", "", "Two cases.", "", "| MiB | ms |", "|---|---|", "| 4 | 0.1 |",
    ]  # fmt: skip

"""`python -m loadtests` lists all measurements and can run each of them."""

from __future__ import annotations

from datetime import date
from importlib.util import find_spec
from pathlib import Path

import pytest

from loadtests import __main__ as listed

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", listed.BENCHES)
def test_every_listed_scenario_can_be_run(name: str) -> None:
    spec = find_spec(f"loadtests.{listed.BENCHES[name].module}")
    assert spec is not None
    assert spec.origin is not None
    file = Path(spec.origin)
    source = file.with_name("__main__.py") if file.name == "__init__.py" else file
    assert '__name__ == "__main__"' in source.read_text()


def test_the_makefile_has_one_target_for_all_of_them() -> None:
    text = (ROOT / "Makefile").read_text()
    assert "python -m loadtests $(NAME) $(ARGS)" in text
    assert len(text.splitlines()) < 150


def test_a_record_is_written_next_to_the_others_by_default() -> None:
    got = listed.arguments("simulate-day", ["--seeds", "2"], "", date(2026, 11, 22))
    assert got == ["--out", "loadtests/results/day-simulated-2026-11-22", "--seeds", "2"]


def test_only_scenarios_that_replay_traces_get_them() -> None:
    day = date(2026, 11, 22)
    assert listed.arguments("compare", [], "FOLDER", day) == ["--traces", "FOLDER"]
    assert listed.arguments("compare", [], "", day) == []
    assert listed.arguments("overhead", [], "FOLDER", day) == []


def test_an_unknown_name_is_refused_with_the_list(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["loadtests", "nothing"])
    assert listed.main() == 2
    told = capsys.readouterr()
    assert "no measurement 'nothing'" in told.err
    assert all(name in told.out for name in listed.BENCHES)

"""The generators of docs read the source right."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tools import coverage_doc, kill_matrix_doc, telemetry_doc
from tools.telemetry_doc import Constant


def test_marks_of_the_module_the_class_and_the_test_all_count() -> None:
    source = """
pytestmark = [pytest.mark.req("S1"), pytest.mark.vllm]
class TestX:
    @pytest.mark.fault("F7", "F8")
    async def test_it(self): ...
@pytest.mark.parametrize("x", [1])
@pytest.mark.req("S2")
def test_that(x): ...
def helper(): ...
"""
    assert list(coverage_doc.tests_in(source)) == [
        ("TestX.test_it", ["S1", "F7", "F8"]),
        ("test_that", ["S1", "S2"]),
    ]


def test_every_number_is_proved_by_a_test_or_says_why_not() -> None:
    page = coverage_doc.document(Path(__file__).parents[2])
    assert "| S1 |" in page
    with pytest.raises(ValueError, match=r"says nothing: F1, .*, S1, "):
        coverage_doc._not_proved({})


def test_a_tests_name_is_shown_whole() -> None:
    names = ["TestX.test_it_works", "test_the_fastest_tier_is_asked"]
    shown = [coverage_doc._sentence(name) for name in names]
    assert shown == ["it works", "the fastest tier is asked"]


def test_names_are_grouped_by_the_comment_above_them() -> None:
    source = (
        '# First.\nA: Final = "a.b"\nB: Final = "c"  # why\n\n'
        '# Second.\nC: Final = (\n    "d"  # on lines\n)\n'
    )
    assert list(telemetry_doc.sections(source)) == [
        ("First", [Constant("A", "a.b"), Constant("B", "c", "why")]),
        ("Second", [Constant("C", "d", "on lines")]),
    ]


def test_a_metric_is_explained_once_and_a_name_that_takes_lines_is_not_lost() -> None:
    page = telemetry_doc.document()
    assert "| `pdmesh.scenario.chosen` | Calls by what chose their scenario" in page
    assert "| `pdmesh.outcome` |" in page
    with pytest.raises(ValueError, match="A is explained more than once"):
        telemetry_doc.meaning_of(Constant("A", "a", "why"), ["What (gauge)"])


def test_make_help_lists_every_target() -> None:
    text = (Path(__file__).parents[3] / "Makefile").read_text().replace("\\\n", "")
    phony = re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    assert phony
    assert set(phony[1].split()) == set(re.findall(r"^([a-z0-9-]+):.*## ", text, re.MULTILINE))


def test_each_table_of_the_kill_matrix_is_replaced_by_its_own_results_and_the_dearest_run_is_told(
    tmp_path: Path,
) -> None:
    def run(what: str, took_s: float) -> str:
        row = {"fault": "F2", "what": what, "peace_s": 0.5, "took_s": took_s}
        return json.dumps(row | {"bound_s": 3.0, "allowed_s": 4.5})

    (tmp_path / "kv").mkdir()
    for number, took_s in enumerate((0.7, 2.1, 0.9)):
        (tmp_path / "kv" / f"{number}.json").write_text(run("it dies", took_s))
    page = kill_matrix_doc.page("# Processes\n\n| nats | 1 |\n", tmp_path)
    assert page.startswith("# Processes\n\n| nats | 1 |\n\n## Faults of KV")
    assert page.endswith("|\n| F2 | it dies | 0.5 | 2.1 | 3.0 | 4.5 |\n")
    assert kill_matrix_doc.page(page, tmp_path) == page


def test_coverage_says_what_a_machine_must_have_for_a_test_to_run() -> None:
    source = (
        "@needs_link\nasync def test_a(): ...\ndef test_b(): ...\n"
        '@pytest.mark.req("S1")\n@needs_fp8\ndef test_c(): ...\n'
    )
    assert coverage_doc.needs_in(source) == {
        "test_a": "network namespaces",
        "test_c": "AVX-512 or AMX",
    }
    whole = "pytestmark = [needs_fp8, pytest.mark.vllm]\ndef test_d(): ...\n"
    assert coverage_doc.needs_in(whole) == {"test_d": "AVX-512 or AMX"}
    assert coverage_doc.needs_in("pytestmark = needs_fp8\ndef test_d(): ...\n") == {
        "test_d": "AVX-512 or AMX"
    }

"""The generators of docs read the source code correctly."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tools import kill_matrix_doc, telemetry_doc
from tools.telemetry_doc import Constant


def test_names_are_grouped_by_the_comment_above_them() -> None:
    source = (
        '# First.\nA: Final = "a.b"\nB: Final = "c"  # why\n\n'
        '# Second.\nC: Final = (\n    "d"  # on lines\n)\n# above it\nD: Final = "e"\n'
    )
    assert list(telemetry_doc.sections(source)) == [
        ("First", [Constant("A", "a.b"), Constant("B", "c", "why")]),
        ("Second", [Constant("C", "d", "on lines"), Constant("D", "e", "above it")]),
    ]


def test_a_metric_is_explained_once_and_a_name_that_takes_lines_is_not_lost() -> None:
    page = telemetry_doc.document()
    spelled = "`pdmesh_scenario_chosen_total{pdmesh_scenario, by}`"
    assert f"| `pdmesh.scenario.chosen`<br>{spelled} | Calls by what chose their scenario" in page
    assert "| `pdmesh.outcome` |" in page
    with pytest.raises(ValueError, match="A is explained more than once"):
        telemetry_doc.meaning_of(Constant("A", "a", "why"), ["What (gauge)"])


def test_make_help_lists_every_target() -> None:
    text = (Path(__file__).parents[3] / "Makefile").read_text().replace("\\\n", "")
    phony = re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    assert phony
    assert set(phony[1].split()) == set(re.findall(r"^([a-z0-9-]+):.*## ", text, re.MULTILINE))


def test_each_table_of_the_kill_matrix_is_replaced_by_its_results_with_the_slowest_run(
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

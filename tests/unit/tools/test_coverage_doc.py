"""docs/coverage.md shows for each requirement which tests passed, not what their marks claim."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import coverage_doc, docs_check

pytest_plugins = ["pytester"]
ROOT = Path(__file__).parents[3]
MARKS = {"S1": {"unit", "vLLM"}, "F1": {"mesh"}}
NO_REASONS: dict[str, str] = {}


def junit(folder: Path, day: str, *cases: str) -> Path:
    """The JUnit file of a suite that ran on `day`."""
    suite = f'<testsuite timestamp="{day}T01:02:03">{"".join(cases)}</testsuite>'
    (folder / f"{day}-{len(list(folder.iterdir()))}.xml").write_text(suite)
    return folder


def case(where: str, number: str, did: str = "") -> str:
    """A test case of `tests/<where>`.

    `did` is skipped, failure or error, or empty if the test passed.
    """
    properties = f'<properties><property name="proves" value="{number}"/></properties>'
    inside = properties + (f"<{did}/>" if did else "")
    return f'<testcase classname="tests.{where}.test_x" name="test_{number}">{inside}</testcase>'


def taken(folder: Path, results: coverage_doc.Results | None = None) -> coverage_doc.Results:
    return coverage_doc.taken_over(results or {}, coverage_doc.outcomes(folder))


def rows(results: coverage_doc.Results, reasons: dict[str, str] = NO_REASONS) -> list[str]:
    page = coverage_doc.page(["S1", "F1"], MARKS, results, reasons)
    return [line for line in page.splitlines() if line.startswith(("| S", "| F"))]


def test_the_strongest_level_that_passed_counts_and_tests_that_never_ran_prove_nothing(
    tmp_path: Path,
) -> None:
    results = taken(junit(tmp_path, "2026-01-02", case("unit.a", "S1")))
    assert rows(results) == [
        "| S1 | unit | 2026-01-02 |  |",
        "| F1 | no test passed (mesh) |",
    ]
    results = taken(junit(tmp_path, "2026-01-03", case("e2e", "S1"), case("chaos", "F1")))
    assert rows(results) == ["| S1 | vLLM | 2026-01-03 |  |", "| F1 | mesh | 2026-01-03 |  |"]


def test_skipped_tests_prove_nothing_and_are_listed_with_the_passed_ones(tmp_path: Path) -> None:
    only = taken(junit(tmp_path, "2026-01-02", case("e2e", "S1", "skipped")))
    assert rows(only)[0] == "| S1 | no test passed (vLLM, unit); vLLM: 1 skipped |"
    both = taken(junit(tmp_path, "2026-01-02", case("unit", "S1")))
    assert rows(both)[0] == "| S1 | unit | 2026-01-02 | vLLM: 1 skipped |"


def test_a_failed_test_proves_nothing_until_it_passes(tmp_path: Path) -> None:
    before = taken(junit(tmp_path, "2026-01-02", case("unit.a", "S1"), case("chaos", "F1")))
    junit(tmp_path, "2026-01-03", case("unit.b", "S1", "failure"), case("chaos", "F1", "error"))
    failed = taken(tmp_path, before)
    assert rows(failed) == [
        "| S1 | no test passed (vLLM, unit); unit failed on 2026-01-03 |",
        "| F1 | no test passed (mesh); mesh failed on 2026-01-03 |",
    ]
    mended = taken(junit(tmp_path, "2026-01-04", case("unit.b", "S1")), failed)
    assert rows(mended)[0] == "| S1 | unit | 2026-01-04 |  |"


def test_a_level_that_did_not_run_keeps_its_day_and_a_test_skipped_elsewhere_has_run(
    tmp_path: Path,
) -> None:
    before: coverage_doc.Results = {"S1": {"vLLM": {"passed": "2026-01-01"}}}
    junit(tmp_path, "2026-01-02", case("unit", "S1"))
    results = taken(junit(tmp_path, "2026-01-03", case("unit", "S1", "skipped")), before)
    assert results == {
        "S1": {"vLLM": {"passed": "2026-01-01"}, "unit": {"passed": "2026-01-02"}},
    }


def test_results_of_a_level_that_no_test_claims_any_more_do_not_count() -> None:
    results: coverage_doc.Results = {"S1": {"simulation": {"passed": "2026-01-01"}}}
    assert rows(results)[0] == "| S1 | no test passed (vLLM, unit) |"


def test_a_number_without_a_test_needs_a_reason() -> None:
    with pytest.raises(ValueError, match=r"says nothing: \['S2'\]"):
        coverage_doc.page(["S1", "S2"], MARKS, {}, NO_REASONS)
    page = coverage_doc.page(["S2", "S3"], MARKS, {}, {"S2-S3": "no GPU"})
    assert page.endswith("| S2 to S3 | no GPU |\n")


def test_the_page_has_the_limits_of_passed_tests() -> None:
    results: coverage_doc.Results = {"S1": {"unit": {"passed": "2026-01-01"}}}
    assert rows(results, {"S1": "in parts"})[0] == "| S1 | unit | 2026-01-01 | in parts |"
    assert rows({}, {"S1": "in parts"})[0] == "| S1 | no test passed (vLLM, unit); in parts |"


def test_every_number_of_the_requirements_is_on_the_page() -> None:
    text = (ROOT / coverage_doc.PAGE).read_text()
    missing = [n for n in docs_check.numbers(ROOT) if n[0] in "SF" and f"| {n} " not in text]
    ranges = [line.split(" |")[0] for line in text.splitlines() if " to S" in line]
    covered = {
        f"S{n}" for r in ranges for n in range(*(int(x[1:]) for x in r[2:].split(" to ")))
    } | {r.rpartition(" ")[2] for r in ranges}
    assert set(missing) <= covered


def test_junit_files_name_the_numbers_of_the_test_its_class_and_its_module(
    pytester: pytest.Pytester,
) -> None:
    for name in ("pyproject.toml", "tests/conftest.py"):
        pytester.path.joinpath(Path(name).name).write_text((ROOT / name).read_text())
    folder = pytester.mkdir("tests") / "unit"
    folder.mkdir()
    (folder / "test_x.py").write_text(
        """
import pytest
pytestmark = pytest.mark.req("S1")
@pytest.mark.fault("F7", "F8")
class TestX:
    @pytest.mark.req("S2")
    def test_it(self): ...
def test_that(): pytest.skip("not here")
"""
    )
    pytester.runpytest_inprocess("tests", "--junitxml=out.xml")
    assert [(o.test, o.numbers, o.result) for o in coverage_doc.outcomes(pytester.path)] == [
        ("unit.test_x.TestX.test_it", ("S2", "S1", "F7", "F8"), "passed"),
        ("unit.test_x.test_that", ("S1",), "skipped"),
    ]

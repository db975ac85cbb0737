"""The check of the docs finds each kind of fault, and finds none in the present docs."""

from __future__ import annotations

from pathlib import Path

from tools import docs_check

ROOT = Path(__file__).parents[3]


def write(root: Path, path: str, text: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_every_cited_number_has_its_line_and_every_named_file_is_there() -> None:
    assert [*docs_check.unexplained(ROOT), *docs_check.lost(ROOT)] == []
    assert list(docs_check.unlisted(ROOT)) == []
    assert {"S40", "F7", "I4"} <= docs_check.cited(ROOT).keys()


def test_a_number_without_a_line_is_named_with_a_file_that_cites_it(tmp_path: Path) -> None:
    write(tmp_path, "docs/requirements.md", "- **S40** No queue.\n- **S41** \n")
    write(tmp_path, "libs/a.py", '"""No queue (S40, S41)."""\n')
    write(tmp_path, "services/b.py", "import x  # noqa: F401\n")
    write(tmp_path, "tests/c.py", '@pytest.mark.fault("F7")\ndef test(): ...  # I4\n')
    missing = "which has no line in docs/requirements.md"
    assert list(docs_check.unexplained(tmp_path)) == [
        f"libs/a.py cites S41, {missing}",
        f"tests/c.py cites F7, {missing}",
        f"tests/c.py cites I4, {missing}",
    ]


def test_a_number_with_two_lines_is_named(tmp_path: Path) -> None:
    write(tmp_path, "docs/requirements.md", "- **F7** Killed.\n- **F7** Killed again.\n")
    assert list(docs_check.unexplained(tmp_path)) == [
        "docs/requirements.md: F7 has more than one line"
    ]


def test_links_and_paths_to_files_that_are_gone_are_named(tmp_path: Path) -> None:
    write(tmp_path, "libs/pdmesh/core/model.py", "")
    write(tmp_path, "docs/other.md", "")
    page = (
        "[a](other.md#there) [b](gone.md) [c](https://example.org/x) [d]\n"
        "`core/model.py` `core/gone.py` `services/gone.py`\n\n[d]: ../libs/gone.py\n"
    )
    write(tmp_path, "docs/page.md", page)
    assert list(docs_check.lost(tmp_path)) == [
        "docs/page.md links gone.md, which is not there",
        "docs/page.md links ../libs/gone.py, which is not there",
        "docs/page.md names core/gone.py, which is not there",
        "docs/page.md names services/gone.py, which is not there",
    ]


def test_a_page_that_the_site_does_not_list_is_named_and_one_that_is_gone(tmp_path: Path) -> None:
    write(tmp_path, "mkdocs.yml", 'nav:\n  - Start: index.md\n  - "1: Gone": adr/1.md\n')
    write(tmp_path, "docs/index.md", "")
    write(tmp_path, "docs/adr/2.md", "")
    assert list(docs_check.unlisted(tmp_path)) == [
        "mkdocs.yml does not list docs/adr/2.md",
        "mkdocs.yml lists docs/adr/1.md, which is not there",
    ]

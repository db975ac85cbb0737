"""Checks hand-written pages: `python -m tools.docs_check`, which `make check` runs.

Each cited number must have one line in the requirements. The files that pages name must exist. The
site's menu must list every page.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

CITING: Final = ("libs", "services", "tests")
SUFFIXES: Final = frozenset({".py", ".proto", ".html", ".js"})
REQUIREMENTS: Final = "docs/requirements.md"
SITE: Final = "mkdocs.yml"
PAGES: Final = ("README.md", "CONTRIBUTING.md", "docs/*.md", "docs/adr/*.md")
# A path that a page names in `code` may begin below one of these folders.
ROOTS: Final = ("", "libs/pdmesh")

_CITED: Final = re.compile(r"\b(?:S(?:\d{1,2}|1[0-4]\d|150)|F(?:[1-9]|[1-3]\d|4[0-2])|I[1-9])\b")
_LINE: Final = re.compile(r"^- \*\*([SFI]\d+)\*\* \S", re.MULTILINE)
_LINK: Final = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)|^\[[^\]]+\]: (\S+)$", re.MULTILINE)
_MENU: Final = re.compile(r"^ +- .*: (\S+\.md)$", re.MULTILINE)
_CODE_PATH: Final = re.compile(r"`((?:core|engine|instance|kv|net|services|tests)/[\w/]+\.py)`")


def cited(root: Path) -> dict[str, Path]:
    """Each number that source or tests cite, with the first file that cites it."""
    found: dict[str, Path] = {}
    for folder in CITING:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in SUFFIXES:
                for number in _CITED.findall(path.read_text()):
                    found.setdefault(number, path.relative_to(root))
    return found


def numbers(root: Path) -> list[str]:
    """The numbers that have a line in the requirements, in the order of the page."""
    return _LINE.findall((root / REQUIREMENTS).read_text())


def unexplained(root: Path) -> Iterator[str]:
    """Cited numbers without a line in the requirements, and numbers with more than one line."""
    lines = numbers(root)
    for number, path in cited(root).items():
        if number not in lines:
            yield f"{path} cites {number}, which has no line in {REQUIREMENTS}"
    for number in sorted({n for n in lines if lines.count(n) > 1}):
        yield f"{REQUIREMENTS}: {number} has more than one line"


def lost(root: Path) -> Iterator[str]:
    """Files that do not exist, although a page links them or names them in `code`."""
    for page in sorted(p for pattern in PAGES for p in root.glob(pattern)):
        text = page.read_text()
        name = page.relative_to(root)
        for links in _LINK.findall(text):
            target = "".join(links)
            if "://" not in target and not (page.parent / target).exists():
                yield f"{name} links {target}, which is not there"
        for path in dict.fromkeys(_CODE_PATH.findall(text)):
            if not any((root / start / path).exists() for start in ROOTS):
                yield f"{name} names {path}, which is not there"


def unlisted(root: Path) -> Iterator[str]:
    """Pages that are missing in the site's menu, and entries of the menu without a page."""
    pages = {str(page.relative_to(root / "docs")) for page in (root / "docs").rglob("*.md")}
    listed = set(_MENU.findall((root / SITE).read_text()))
    yield from (f"{SITE} does not list docs/{page}" for page in sorted(pages - listed))
    yield from (f"{SITE} lists docs/{page}, which is not there" for page in sorted(listed - pages))


def main() -> int:
    root = Path(__file__).parents[1]
    found = [*unexplained(root), *lost(root), *unlisted(root)]
    print(*found, sep="\n", end="\n" * bool(found))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())

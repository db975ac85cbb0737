"""Checks the rules that keep the tree readable: `python -m tools.rooms`, which `make check` runs.

A folder has at most 15 files, and each module has a docstring. A public class name is defined once.
A module of the core that has functions has a test file of its own. Constructors have few
parameters. import-linter finds circular imports between folders (pyproject.toml).
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

MAX_FILES = 15
MAX_PARAMETERS = 6  # parameters of a constructor, without `self`
CODE = ("libs", "services", "tools", "loadtests")
TESTS = ("tests",)
CORE, CORE_TESTS = "libs/pdmesh/core", "tests/unit/core"
SERVICES = ("libs/pdmesh", "services")
# Folders of generated code.
GENERATED = ("libs/pdmesh/v1", "libs/pdmesh/events/v1", "libs/pdmesh/envoy/v3")
# Class name -> why it may be defined more than once.
SHARED_NAMES = {
    "Settings": "each service reads its own; tools find them by this name",
}


def modules(root: Path, *folders: str) -> Iterator[Path]:
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            if not any(path.is_relative_to(root / made) for made in GENERATED):
                yield path


def crowded(root: Path) -> Iterator[str]:
    """Folders with more files than a reader can survey."""
    counts: dict[Path, int] = defaultdict(int)
    for path in modules(root, *CODE, *TESTS):
        counts[path.parent] += path.name != "__init__.py"
    for folder, count in sorted(counts.items()):
        if count > MAX_FILES:
            yield f"{folder.relative_to(root)}: {count} files, more than {MAX_FILES}"


def silent(root: Path) -> Iterator[str]:
    """Modules and packages without a docstring."""
    for path in modules(root, *CODE):
        if ast.get_docstring(ast.parse(path.read_text())) is None:
            yield f"{path.relative_to(root)}: no docstring says what is decided or done there"


def namesakes(root: Path) -> Iterator[str]:
    """Public classes with the same name. A reader who searches for one would find the other."""
    homes: dict[str, list[str]] = defaultdict(list)
    for path in modules(root, *SERVICES):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(str(path.relative_to(root)))
    for name, paths in sorted(homes.items()):
        if len(paths) > 1 and name not in SHARED_NAMES:
            yield f"class {name} is defined in {', '.join(paths)}"


def untested(root: Path) -> Iterator[str]:
    """Modules of the core that have a function but no test file of their own.

    `core/a/b.py` is tested by `tests/unit/core/a/test_b.py`. A module without a function decides
    nothing.
    """
    for path in modules(root, CORE):
        nodes = ast.walk(ast.parse(path.read_text()))
        place = path.relative_to(root / CORE)
        mirror = Path(CORE_TESTS) / place.with_name(f"test_{place.name}")
        if any(isinstance(n, ast.FunctionDef) for n in nodes) and not (root / mirror).exists():
            yield f"{path.relative_to(root)}: decides, and {mirror} is not there"


def unwieldy(root: Path) -> Iterator[str]:
    """Constructors with too many parameters, and lambdas that set an attribute."""
    for path in modules(root, *SERVICES):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                for method in node.body:
                    if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                        count = len(method.args.args) - 1 + len(method.args.kwonlyargs)
                        if count > MAX_PARAMETERS:
                            where = f"{path.relative_to(root)}: {node.name}"
                            yield f"{where} takes {count} parameters, more than {MAX_PARAMETERS}"
            elif isinstance(node, ast.Lambda) and any(
                isinstance(inner, ast.Name) and inner.id == "setattr"
                for inner in ast.walk(node.body)
            ):
                yield f"{path.relative_to(root)}:{node.lineno}: a lambda calls setattr"


def check(root: Path) -> list[str]:
    return [*crowded(root), *silent(root), *namesakes(root), *untested(root), *unwieldy(root)]


def main() -> int:
    found = check(Path(__file__).parents[1])
    print(*found, sep="\n", end="\n" * bool(found))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())

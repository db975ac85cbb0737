"""The check of the source tree finds each kind of fault, and finds none in the present tree."""

from __future__ import annotations

from pathlib import Path

from tools import rooms

ROOT = Path(__file__).parents[3]


def write(root: Path, path: str, text: str = '"""Here."""\n') -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_the_present_tree_has_no_fault() -> None:
    assert rooms.check(ROOT) == []


def test_a_crowded_folder_is_named_with_its_number(tmp_path: Path) -> None:
    for number in range(rooms.MAX_FILES + 1):
        write(tmp_path, f"libs/pdmesh/many/m{number}.py")
    write(tmp_path, "libs/pdmesh/many/__init__.py")
    assert list(rooms.crowded(tmp_path)) == ["libs/pdmesh/many: 16 files, more than 15"]


def test_generated_folders_may_hold_any_number(tmp_path: Path) -> None:
    for number in range(rooms.MAX_FILES + 1):
        write(tmp_path, f"libs/pdmesh/v1/m{number}.py")
    assert list(rooms.crowded(tmp_path)) == []


def test_a_module_without_a_docstring_is_named(tmp_path: Path) -> None:
    write(tmp_path, "services/a/mute.py", "x = 1\n")
    write(tmp_path, "services/a/spoken.py")
    assert [line.split(":")[0] for line in rooms.silent(tmp_path)] == ["services/a/mute.py"]


def test_two_public_classes_with_one_name_are_reported_with_both_files(tmp_path: Path) -> None:
    twice = '"""Here."""\n\n\nclass Plan:\n    pass\n\n\nclass _Own:\n    pass\n'
    write(tmp_path, "libs/pdmesh/a.py", twice)
    write(tmp_path, "services/b.py", twice)
    assert list(rooms.namesakes(tmp_path)) == [
        "class Plan is defined in libs/pdmesh/a.py, services/b.py"
    ]


def test_names_that_are_shared_on_purpose_are_allowed(tmp_path: Path) -> None:
    for service in ("a", "b"):
        write(tmp_path, f"services/{service}.py", '"""Here."""\n\n\nclass Settings:\n    pass\n')
    assert list(rooms.namesakes(tmp_path)) == []


def test_a_module_of_the_core_that_decides_has_its_tests_beside_it(tmp_path: Path) -> None:
    decides = '"""Here."""\n\n\nclass Judge:\n    def handle(self) -> None: ...\n'
    for name in ("a/judged", "a/unjudged"):
        write(tmp_path, f"libs/pdmesh/core/{name}.py", decides)
    write(tmp_path, "libs/pdmesh/core/a/events.py", '"""Here."""\n\n\nclass Began:\n    n: int\n')
    write(tmp_path, "tests/unit/core/a/test_judged.py")
    (found,) = rooms.untested(tmp_path)
    assert found.startswith("libs/pdmesh/core/a/unjudged.py: decides, and tests/unit/core/a/")


def test_a_constructor_with_too_many_parameters_is_named(tmp_path: Path) -> None:
    most = ", ".join(f"p{n}" for n in range(rooms.MAX_PARAMETERS))
    classes = f"""\"\"\"Here.\"\"\"


class Fits:
    def __init__(self, {most}): ...


class Wide:
    def __init__(self, {most}, *, more): ...
"""
    write(tmp_path, "services/a.py", classes)
    assert list(rooms.unwieldy(tmp_path)) == ["services/a.py: Wide takes 7 parameters, more than 6"]


def test_a_lambda_that_assigns_is_named(tmp_path: Path) -> None:
    text = '"""Here."""\n\nf = lambda x: setattr(x, "y", 1)\ng = lambda x: x.y\n'
    write(tmp_path, "libs/pdmesh/a.py", text)
    assert list(rooms.unwieldy(tmp_path)) == ["libs/pdmesh/a.py:3: a lambda calls setattr"]

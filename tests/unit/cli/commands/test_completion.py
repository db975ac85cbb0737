"""A shell completes the commands, their options and the values of an option."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from pdmesh.cli import app

COMPLETE = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
$(complete -p pdmesh | sed 's/.*-F \\([^ ]*\\) .*/\\1/')
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    with pytest.raises(SystemExit) as ended:
        app.main(["completion", "bash"])
    assert ended.value.code == 0
    path = tmp_path / "completion.bash"
    path.write_text(capsys.readouterr().out)
    return path


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (["pdmesh", "tr"], {"trace"}),
        (["pdmesh", "adapters", "r"], {"remove"}),
        (["pdmesh", "up", "--eng"], {"--engine", "--engine-arg"}),
        (["pdmesh", "up", "--engine", "s"], {"sim"}),
    ],
)
def test_bash_completes(script: Path, words: list[str], completed: set[str]) -> None:
    done = subprocess.run(
        ["bash", "-c", COMPLETE, "bash", str(script), *words],
        capture_output=True,
        text=True,
        check=True,
    )
    assert set(done.stdout.split()) == completed

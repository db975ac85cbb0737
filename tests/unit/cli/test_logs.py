"""`pdmesh logs` shows the lines of several processes in the order of time."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest

from pdmesh.cli import app
from pdmesh.cli.view.log_lines import LogTail, as_text, followed, of_process


def entry(at: int, event: str, **fields: object) -> str:
    stamp = f"2026-11-21T12:00:{at:02d}.250000Z"
    return json.dumps({**fields, "event": event, "level": "info", "timestamp": stamp} | fields)


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "gateway-0.log.1").write_text(entry(1, "older") + "\n")
    (logs / "gateway-0.log").write_text(
        entry(3, "request.begun", request_id="r-7")
        + "\n"
        + entry(5, "slow", level="warning")
        + "\n"
    )
    (logs / "decode-0.log").write_text(
        entry(4, "leg.begun", request_id="r-7-1") + "\nTraceback\n" + entry(6, "late") + "\n"
    )
    return tmp_path


def logs(state_dir: Path, capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    with pytest.raises(SystemExit) as ended:
        app.main(["logs", "--state-dir", str(state_dir), *words])
    said = capsys.readouterr()
    assert (ended.value.code, said.err) == (0, "")
    return said.out.splitlines()


def test_lines_of_all_processes_are_shown_in_the_order_of_time(
    state_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert logs(state_dir, capsys) == [
        "12:00:01.250 gateway-0  info    older",
        "12:00:03.250 gateway-0  info    request.begun request_id=r-7",
        "12:00:04.250 decode-0  info    leg.begun request_id=r-7-1",
        "12:00:04.250 decode-0  Traceback",
        "12:00:05.250 gateway-0  warning slow",
        "12:00:06.250 decode-0  info    late",
    ]


def test_lines_may_be_chosen_by_process_request_level_and_number(
    state_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(logs(state_dir, capsys, "decode-0")) == 3
    assert [line.split()[1] for line in logs(state_dir, capsys, "--request", "r-7")] == [
        "gateway-0",
        "decode-0",
    ]
    assert len(logs(state_dir, capsys, "--level", "warning")) == 1
    assert logs(state_dir, capsys, "-n", "1") == ["12:00:06.250 decode-0  info    late"]
    (line,) = logs(state_dir, capsys, "-n", "1", "--json")
    assert json.loads(line)["event"] == "late"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["decoed-0"], "no log of decoed-0; did you mean decode-0?"),
        (["x"], "no log of x; there are decode-0, gateway-0"),
    ],
)
def test_an_unknown_process_is_named(
    words: list[str], said: str, state_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        app.main(["logs", "--state-dir", str(state_dir), *words])
    assert ended.value.code == 1
    assert capsys.readouterr().err == f"pdmesh: {said}\n"


def test_without_logs_it_says_where_it_looked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        app.main(["logs", "--state-dir", str(tmp_path)])
    assert f"there are no logs in {tmp_path}/logs" in capsys.readouterr().err


def test_following_shows_whole_lines_once_even_if_the_file_is_truncated(tmp_path: Path) -> None:
    file = tmp_path / "decode-0.log"
    file.write_text("before\n")
    tail = LogTail(file, file.stat().st_size)
    steps: list[Callable[[], object]] = [
        lambda: file.write_text("before\none\nha"),
        lambda: file.write_text("before\none\nhalf\n"),
        lambda: file.write_text("anew\n"),  # the launcher has moved the full file away
        file.unlink,
        lambda: file.write_text(""),
        lambda: file.write_text("again\n"),
    ]

    def pause() -> None:
        steps.pop(0)()

    lines = followed(lambda: [("decode-0", tail)], pause)
    assert [line.text for line in islice(lines, 4)] == ["one", "half", "anew", "again"]


def test_an_exception_is_shown_below_its_line() -> None:
    (line,) = of_process("decode-0", [entry(1, "bug", exception="Traceback:\n  boom")])
    assert as_text(line).splitlines()[1:] == ["Traceback:", "  boom"]

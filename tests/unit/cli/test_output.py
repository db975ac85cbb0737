"""The output of commands for people and for programs, once or repeatedly."""

from __future__ import annotations

import argparse
import json
import sys
import time
from argparse import Namespace

import pytest
import yaml

from pdmesh.cli.arguments import build_parser
from pdmesh.cli.commands.look.status import Status, _row, _text
from pdmesh.cli.errors import CommandFailed
from pdmesh.cli.view.output import show
from pdmesh.cli.view.watching import watched
from pdmesh.errors import Unavailable
from pdmesh.v1 import admin_service_pb2 as pb
from pdmesh.v1.common_pb2 import InstanceRecord, Role

BOOK = pb.DesiredVersion(version=7, author="Zoë", text="groups: {}\n")


def test_one_result_has_a_form_for_people_and_two_for_programs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    printed = {}
    for output in ("text", "json", "yaml"):
        show(Namespace(output=output), BOOK, lambda: "version 7")
        printed[output] = capsys.readouterr().out
    assert printed["text"] == "version 7\n"
    assert json.loads(printed["json"]) == yaml.safe_load(printed["yaml"])
    assert "Zoë" in printed["yaml"]


@pytest.mark.parametrize(
    "words",
    [["status"], ["events"], ["groups"], ["diff", "f"], ["apply", "f"], ["rollback"], ["promote"],
        ["drain", "i"], ["cordon", "i"], ["uncordon", "i"], ["ratio"], ["pins", "list"],
        ["pins", "remove", "x"], ["adapters", "list"], ["keys", "list"]],
)  # fmt: skip
def test_every_command_with_a_result_prints_it_for_programs_too(words: list[str]) -> None:
    parse = build_parser().parse_args
    assert parse(words).output == "text"
    assert parse([*words, "-o", "yaml"]).output == "yaml"
    assert parse([*words, "--json"]).output == "json"


class Interrupted:
    """Replaces the pause between two views. During the last pause the user presses Ctrl-C."""

    def __init__(self, num_pauses: int) -> None:
        self.num_left = num_pauses

    def __call__(self, seconds: float) -> None:
        assert seconds == 2.0
        self.num_left -= 1
        if not self.num_left:
            raise KeyboardInterrupt


def test_a_watched_command_shows_a_later_failure_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = iter(["one", Unavailable("no master leads"), CommandFailed("NATS is away"), "two"])

    def run(options: argparse.Namespace) -> int:
        result = next(results)
        if isinstance(result, Exception):
            raise result
        print(result)
        return 0

    monkeypatch.setattr(time, "sleep", Interrupted(4))
    assert watched(run, Namespace(every=2.0)) == 0
    assert capsys.readouterr().out == "one\nno master leads\nNATS is away\ntwo\n"


def test_a_watched_command_that_fails_at_first_ends(capsys: pytest.CaptureFixture[str]) -> None:
    def run(options: argparse.Namespace) -> int:
        raise CommandFailed("no mesh is running here")

    with pytest.raises(CommandFailed, match="no mesh"):
        watched(run, Namespace(every=2.0))


def test_a_terminal_shows_one_view_at_a_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(time, "sleep", Interrupted(2))
    assert watched(lambda options: print("view") or 0, Namespace(every=2.0)) == 0
    assert capsys.readouterr().out == "\x1b[H\x1b[Jview\n" * 2


@pytest.mark.req("S50")
@pytest.mark.parametrize("path", ["", "host: UCX has no RDMA here, only self, tcp"])
def test_the_path_of_kv_and_its_reason_are_shown_if_there_is_one(path: str) -> None:
    record = InstanceRecord(
        instance_id="decode-0", service="decode", role=Role.ROLE_DECODE, kv_path=path
    )
    text = _text(Status(None, leader_epoch=1, rows=[_row(record, None, {})]))
    assert ("KV MEMORY" in text) == bool(path)
    if path:
        (line,) = [each for each in text.splitlines() if "UCX has" in each]
        assert line.split(maxsplit=2) == ["decode-0", "host", path.removeprefix("host: ")]


def test_ranks_that_differ_have_a_line_each() -> None:
    record = InstanceRecord(
        instance_id="decode-0",
        service="decode",
        role=Role.ROLE_DECODE,
        kv_path="device: cuda_ipc between the GPUs of this machine | host: the arenas need 512 MiB",
    )
    text = _text(Status(None, leader_epoch=1, rows=[_row(record, None, {})]))
    found = [line.split(maxsplit=2)[1] for line in text.splitlines() if "decode-0" in line]
    assert found[-2:] == ["device", "host"]

"""Tests how the commands parse arguments, show results and report errors."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import TypeVar

import pytest
from google.protobuf import json_format

from pdmesh.cli import (
    app,
    connect,
    leader,
    texts,
)
from pdmesh.cli.arguments import build_parser
from pdmesh.cli.commands import admin, chat
from pdmesh.cli.commands.look import events
from pdmesh.cli.errors import CommandFailed
from pdmesh.cli.hints import default_state_dir
from pdmesh.cli.view.table import table
from pdmesh.client import client
from pdmesh.client.events import KINDS
from pdmesh.events.v1.events_pb2 import Header, HealthChanged, KvBlocks
from pdmesh.launcher import state
from pdmesh.net.bus import Message
from pdmesh.v1 import admin_service_pb2 as pb

T = TypeVar("T")
Answer = Callable[[BaseHTTPRequestHandler], None]


@contextmanager
def gateway(answer: Answer) -> Iterator[str]:
    """The address of an HTTP server that gives one answer."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            answer(self)

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        thread.join(60)


def streamed(*lines: str) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write("".join(f"data: {line}\n\n" for line in lines).encode())

    return answer


def piece(text: str) -> str:
    return json.dumps({"choices": [{"delta": {"content": text}}]})


def ask(url: str) -> str:
    return "".join(chat.ask(url, "hello", "default", 8, 0.0))


def test_a_streamed_answer_is_joined_from_its_pieces() -> None:
    with gateway(streamed(piece("Par"), piece("is"), '{"choices": []}', "[DONE]")) as url:
        assert ask(url) == "Paris"


def test_an_answer_that_breaks_off_is_reported_as_incomplete() -> None:
    with gateway(streamed(piece("Par"))) as url, pytest.raises(CommandFailed, match="broke off"):
        ask(url)


def test_an_error_within_the_stream_is_shown_with_its_message() -> None:
    error = json.dumps({"error": {"message": "the instance was lost"}})
    with (
        gateway(streamed(piece("Par"), error)) as url,
        pytest.raises(CommandFailed, match="the instance was lost"),
    ):
        ask(url)


def test_a_refusal_is_shown_with_the_message_of_the_gateway() -> None:
    def refuse(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(404)
        handler.end_headers()
        handler.wfile.write(b'{"error": {"message": "no model is called gpt-9"}}')

    with gateway(refuse) as url, pytest.raises(CommandFailed, match="no model is called gpt-9"):
        ask(url)


@pytest.mark.parametrize("command", [["chat", "hi"], ["status"], ["events"]])
def test_without_a_mesh_each_command_says_so_in_one_line(
    command: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = "pdmesh: no mesh is running here; start one with: pdmesh up"
    place = tmp_path / "my mesh"
    for environment, arguments, how in (
        (place, [], ""),
        (tmp_path, ["--state-dir", str(place)], f" --state-dir '{place}'"),
    ):
        monkeypatch.setenv("PDMESH_STATE_DIR", str(environment))
        with pytest.raises(SystemExit) as exit_info:
            app.main([*command, *arguments])
        assert exit_info.value.code == 1
        assert capsys.readouterr().err == f"{said}{how}\n"


@pytest.mark.parametrize(
    "words",
    [
        ["up"], ["down"], ["status"], ["chat", "hi"], ["events"], ["groups"], ["diff", "f"],
        ["apply", "f"],
        ["rollback"], ["promote"], ["drain", "i"], ["cordon", "i"],
        ["uncordon", "i"], ["ratio"],
        ["keys", "list"], ["keys", "add", "acme"], ["keys", "revoke", "id"], ["pins", "list"],
        ["pins", "remove", "x"],
        ["pins", "add", "x", "--text", "-"], ["artefact", "verify", "f"],
        ["artefact", "build", "d", "--role", "prefill", "--out", "o"],
    ],
)  # fmt: skip
def test_every_command_takes_its_state_directory_before_and_after_each_word(
    words: list[str],
) -> None:
    num_places = 3 if words[0] in {"keys", "pins", "artefact"} else 2
    for place in range(num_places):
        asked = [*words[:place], "--state-dir", "there", *words[place:]]
        assert build_parser().parse_args(asked).state_dir == Path("there"), asked
    twice = ["--state-dir", "here", words[0], "--state-dir", "there", *words[1:]]
    assert build_parser().parse_args(twice).state_dir == Path("there")
    assert build_parser().parse_args(words).state_dir == default_state_dir()


def test_options_of_pins_may_stand_before_its_action() -> None:
    asked = ["pins", "--nats-url", "nats://x", "--admin-token", "t", "list"]
    options = build_parser().parse_args(asked)
    assert (options.nats_url, options.admin_token, options.module) == ("nats://x", "t", "pins")


@pytest.mark.parametrize(
    "command", [["up", "--engine", "sim"], ["down"], ["status"], ["keys", "list"]]
)
@pytest.mark.parametrize("within", ["", "/deeper"])
def test_a_state_directory_that_is_a_file_is_named(
    command: list[str], within: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "file").touch()
    with pytest.raises(SystemExit) as ended:
        app.main(["--state-dir", f"{file}{within}", *command])
    assert ended.value.code == 1
    assert capsys.readouterr().err == f"pdmesh: --state-dir: {file} is not a directory\n"


def test_a_failed_diff_does_not_count_as_a_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit codes are those of diff(1) and kubectl: 0 for equal, 1 for different, above 1 for
    errors.
    """
    (tmp_path / "groups.yaml").write_text("groups: {}")
    for file, said in (("missing.yaml", "No such file"), ("groups.yaml", "no mesh is running")):
        with pytest.raises(SystemExit) as ended:
            app.main(["diff", str(tmp_path / file), "--state-dir", str(tmp_path / "none")])
        assert ended.value.code == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("base", ["", "/", "/v1", "/v1/"])
def test_a_gateway_may_be_given_by_its_base_url_too(base: str) -> None:
    with gateway(streamed(piece("Paris"), "[DONE]")) as url:
        assert ask(f"{url}{base}") == "Paris"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["chat", "hi", "--url", "http://[x"], "Invalid IPv6 URL"),
        (["chat", "hi", "--url", "localhost:8000"], "is not a gateway's address"),
        (["chat", "hi", "--url", "http://a:b"], "nonnumeric port"),
        (["up", "--engine", "sim", "--detach", "--state-dir", "/proc/mesh"], "No such file"),
        (["up", "--prefill", "two"], "--prefill: must be 0 to 64"),
        (["rollback", "--", "-1"], "version: must be 0 to"),
        (["apply", "-", "--expect-version", "9" * 20], "--expect-version: must be 0 to"),
        (["pins", "add", "x", "--text", "-", "--ttl", "99999d"], "--ttl: must be 0 to 1000"),
    ],
)
def test_a_mistyped_command_is_reported_without_a_traceback(
    command: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        app.main(command)
    assert ended.value.code in (1, 2)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("wrong", ["-1", "4294967296", "one"])
def test_an_invalid_entry_in_a_file_of_tokens_is_named(
    wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"1, 2 {wrong} 3")
    with pytest.raises(SystemExit) as ended:
        app.main(["pins", "add", "x", "--token-ids", str(tokens)])
    assert ended.value.code == 1
    assert f"{wrong} is not a token id" in capsys.readouterr().err


def test_an_invalid_port_in_the_environment_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PDMESH_HTTP_PORT", "http")
    assert build_parser().parse_args(["status"]).command == "status"
    with pytest.raises(SystemExit):
        app.main(["up", "--engine", "sim"])
    assert "argument --http-port: must be 0 to 65535" in capsys.readouterr().err


def test_a_closed_output_pipe_is_not_reported_as_a_lost_gateway(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gone(text: str) -> int:
        raise BrokenPipeError

    monkeypatch.setattr("sys.stdout.write", gone)
    with gateway(streamed(piece("Paris"), "[DONE]")) as url, pytest.raises(BrokenPipeError):
        chat.run(build_parser().parse_args(["chat", "hi", "--url", url]))


def test_a_mesh_without_its_nats_is_still_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(client, "_CONNECT_S", 0.2)
    # other tests read the logs, so logging stays on
    monkeypatch.setattr(connect, "be_quiet", lambda: None)
    mesh = state.MeshState(
        1, "ready", "sim", "sim", "http://x", "x:1", "nats://127.0.0.1:1", "unix:///x",
        processes={"nats": state.ProcessState(0, "nats", "waiting")},
    )  # fmt: skip
    with state.lock(tmp_path):
        state.write(tmp_path, mesh)
        with pytest.raises(SystemExit) as ended:
            app.main(["status", "--state-dir", str(tmp_path)])
    shown = capsys.readouterr().out
    assert ended.value.code == 1
    assert "NATS does not answer at nats://127.0.0.1:1" in shown
    assert "nats     waiting" in shown


def test_a_mesh_elsewhere_is_not_shown_as_the_one_that_runs_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If the other NATS answered, the command once showed "mesh: ready" and the processes of the
    local mesh. The exit code was 0.
    """
    monkeypatch.setattr(client, "_CONNECT_S", 0.2)
    # other tests read the logs, so logging stays on
    monkeypatch.setattr(connect, "be_quiet", lambda: None)
    mesh = state.MeshState(
        1, "ready", "sim", "sim", "http://x", "x:1", "nats://here:1", "unix:///x"
    )
    with state.lock(tmp_path):
        state.write(tmp_path, mesh)
        with pytest.raises(SystemExit) as ended:
            app.main(["status", "--nats-url", "nats://127.0.0.1:1", "--state-dir", str(tmp_path)])
    said = capsys.readouterr()
    assert ended.value.code == 1
    assert "mesh:" not in said.out
    assert said.err.startswith("pdmesh: NATS does not answer at nats://127.0.0.1:1")


@pytest.mark.parametrize(
    "content", ["", "{}", '{"pid": 1, "phase": "ready", "processes": {}}', "[1]"]
)
@pytest.mark.parametrize(
    "command", [["status"], ["chat", "hi"], ["groups"], ["up", "--engine", "sim"]]
)
def test_state_written_by_another_release_is_reported_in_one_clear_line(
    content: str, command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with state.lock(tmp_path):
        state.mesh_file(tmp_path).write_text(content)
        with pytest.raises(SystemExit) as ended:
            app.main([*command, "--state-dir", str(tmp_path)])
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert said.startswith(f"pdmesh: {tmp_path}/mesh.json: not written by this release")
    assert f"pdmesh down --state-dir {tmp_path}" in said


@pytest.mark.parametrize("name", ["x" * 300, "loop"])
@pytest.mark.parametrize("command", ["status", "down", "groups"])
def test_an_impossible_path_is_reported_in_one_clear_line(
    name: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (loop := tmp_path / "loop").symlink_to(loop)
    with pytest.raises(SystemExit) as ended:
        app.main([command, "--state-dir", str(tmp_path / name)])
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert said.startswith("pdmesh: ")
    assert "Traceback" not in said


@pytest.mark.parametrize("command", ["diff", "apply"])
def test_an_endless_file_is_read_only_up_to_the_size_limit(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such a file was once read until the machine had no memory left."""
    source = io.StringIO("#" * (texts.MAX_BYTES + 2))
    monkeypatch.setattr(Path, "open", lambda *_, **__: source)
    with pytest.raises(SystemExit) as ended:
        app.main([command, "endless.yaml"])
    assert ended.value.code != 0
    assert f"endless.yaml: longer than {texts.MAX_BYTES} bytes" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["chat", "-", "--url", "http://127.0.0.1:1"], ["diff", "-"]])
def test_a_closed_stdin_is_reported_in_one_clear_line(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(SystemExit) as ended:
        app.main(command)
    assert ended.value.code != 0
    assert "-: stdin is closed" in capsys.readouterr().err


def test_an_answer_without_a_reader_logs_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python has no stdout if, for example, a shell closes it with `>&-`."""
    monkeypatch.setattr(sys, "stdout", None)
    with gateway(streamed(piece("Paris"), "[DONE]")) as url, pytest.raises(SystemExit) as ended:
        app.main(["chat", "hi", "--url", url])
    sys.stdout.close()
    assert ended.value.code == 0


def test_a_full_disk_behind_stdout_is_reported_in_one_clear_line(tmp_path: Path) -> None:
    """The table is longer than the output buffer. So the command fails in the middle and not at its
    end.
    """
    program = (
        "import sys; from pdmesh.cli import app; from pdmesh.cli.commands.look import status;"
        "status.run = lambda options: print('x' * 100_000) or 0;"
        "app.main(['status'])"
    )
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", program],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr) == (
        1,
        "pdmesh: No space left on device\n",
    )


def test_down_succeeds_if_no_mesh_is_running(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        app.main(["down", "--state-dir", str(tmp_path)])
    assert exit_info.value.code == 0
    assert capsys.readouterr().out == "no mesh is running here\n"


HEADER = Header(publisher_id="monitor", incarnation=7, sequence=1)


def test_a_json_event_is_one_readable_line() -> None:
    HEADER.occurred_at.FromJsonString("2026-11-21T12:00:01Z")
    event = HealthChanged(header=HEADER, instance_id="decode-0", to_health="dead", silent_s=3.25)
    message = Message("mesh.v1.health.changed.decode-0", json_format.MessageToJson(event).encode())
    line = events.as_line(message)
    assert line.startswith("12:00:01 health.changed decode-0 ")
    assert line.endswith("instanceId=decode-0 toHealth=dead silentS=3.25")


def test_a_binary_event_is_decoded_and_its_hashes_are_counted() -> None:
    blocks = KvBlocks(header=HEADER, stored=[bytes([i]) * 16 for i in range(9)])
    message = Message(
        "mesh.v1.kv.blocks.prefill-0",
        blocks.SerializeToString(),
        {"content-type": "application/x-protobuf"},
    )
    assert events.as_line(message).endswith("stored=[9]")
    assert len(json.loads(events.as_json(message))["event"]["stored"]) == 9


@pytest.mark.parametrize("subject", ["mesh.v1.health.changed.x", "mesh.v1.new.kind.x", "short"])
def test_an_event_that_cannot_be_decoded_is_still_shown(subject: str) -> None:
    assert subject.removeprefix("mesh.v1.").replace(".x", " x") in events.as_line(
        Message(subject, b"\xff\xfe")
    )


def test_every_event_of_the_catalogue_can_be_shown() -> None:
    """Every subject in the catalogue needs a kind here, or its events would be shown undecoded."""
    from pdmesh.net import subjects

    builders = [f for n, f in vars(subjects).items() if callable(f) and not n.startswith("_")]
    kinds = {tuple(builder("x").split(".")[2:4]) for builder in builders}
    assert kinds == set(KINDS)


class Leader:
    """The leading master, to which two files were applied."""

    texts: tuple[str, ...] = ("", "groups: {}\n", "# the second\ngroups: {}")

    async def GetDesired(self, request: pb.GetDesiredRequest, **_: object) -> pb.GetDesiredResponse:
        version = request.version or len(self.texts) - 1
        if version == 0:
            return pb.GetDesiredResponse()
        found = pb.DesiredVersion(version=version, text=self.texts[version])
        return pb.GetDesiredResponse(desired=found)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [(["1"], "groups: {}\n"), ([], "# the second\ngroups: {}\n")],
)
def test_the_file_of_a_version_is_shown_as_it_was_applied(
    arguments: list[str],
    shown: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ask_leader(monkeypatch, Leader())
    with pytest.raises(SystemExit) as ended:
        app.main(["groups", "--text", *arguments])
    assert ended.value.code == 0
    assert capsys.readouterr().out == shown


def test_without_a_desired_state_there_is_no_file_to_show(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    leader = Leader()
    leader.texts = ("",)
    ask_leader(monkeypatch, leader)
    with pytest.raises(SystemExit):
        app.main(["groups", "--text"])
    assert "pdmesh apply FILE" in capsys.readouterr().err


@pytest.mark.parametrize("allow_empty", [False, True])
def test_the_flag_that_allows_an_empty_desired_state_is_passed_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, allow_empty: bool
) -> None:
    asked: list[pb.ApplyDesiredRequest] = []

    class Applying(Leader):
        async def ApplyDesired(
            self, request: pb.ApplyDesiredRequest, **_: object
        ) -> pb.ApplyDesiredResponse:
            asked.append(request)
            return pb.ApplyDesiredResponse(version=1)

    ask_leader(monkeypatch, Applying())
    file = tmp_path / "groups.yaml"
    file.write_text("")
    with pytest.raises(SystemExit) as ended:
        app.main(["apply", str(file), *(["--allow-empty"] if allow_empty else [])])
    assert ended.value.code == 0
    assert asked[0].allow_empty is allow_empty


def test_a_file_that_wants_more_instances_than_there_are_says_how_many(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Applying(Leader):
        async def ApplyDesired(
            self, request: pb.ApplyDesiredRequest, **_: object
        ) -> pb.ApplyDesiredResponse:
            return pb.ApplyDesiredResponse(version=1)

        async def ListGroupStates(
            self, request: pb.ListGroupStatesRequest, **_: object
        ) -> pb.ListGroupStatesResponse:
            group = pb.GroupState(group_id="old", members=[pb.GroupMember(instance_id="i-0")])
            # i-0 leaves the group and is blank, so it is in both lists
            blank = [f"i-{i}" for i in range(6)]
            return pb.ListGroupStatesResponse(groups=[group], blank_instance_ids=blank)

    ask_leader(monkeypatch, Applying())
    file = tmp_path / "groups.yaml"
    for prefill, decode, is_too_much in ((20, 20, True), (3, 3, False)):
        file.write_text(f"groups:\n  chat: {{prefill: {prefill}, decode: {decode}}}\n")
        with pytest.raises(SystemExit) as ended:
            app.main(["apply", str(file)])
        assert ended.value.code == 0
        said = capsys.readouterr().err
        wanted = "need 40 instances, but only 6 can get a role: they wait for 34 more"
        assert (wanted in said, "they wait for" in said) == (is_too_much, is_too_much)


def ask_leader(monkeypatch: pytest.MonkeyPatch, asked: Leader) -> None:
    async def call(bus: None, token: str, invoke: Callable[..., Awaitable[T]]) -> T:
        return await invoke(asked, (), 1.0)

    monkeypatch.setattr(leader, "connected", lambda _: nullcontext())
    monkeypatch.setattr(leader, "call_leader", call)


def test_an_answer_in_another_protocol_is_not_put_on_the_terminal() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"\x00\x1b[2J\x00\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(CommandFailed, match="does not speak HTTP"):
            ask(url)
        thread.join(60)


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    assert table(("A", "B"), [("long", "1"), ("x", "22")]) == "A     B\nlong  1\nx     22"


def test_groups_say_first_that_the_leader_changes_nothing() -> None:
    states = pb.ListGroupStatesResponse(version=3, paused="version 3 cannot be read")
    lines = admin.groups_text(states).splitlines()
    assert lines[0] == "desired state: version 3"
    assert lines[1] == "THE LEADER MAKES NO CHANGES NOW: version 3 cannot be read"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (["up", "--gateways", "0"], "must be 1 to 64"),
        (["up", "--masters", "0"], "must be 1 to 64"),
        (["up", "--timeout", "soon"], "must be a positive number"),
        (["down", "--timeout", "-1"], "must be a positive number"),
        (["keys", "add", "acme", "--weight", "1.5"], "must be a positive whole number"),
        (["apply", "f", "--canary", "some"], "must be more than 0 and less than 1"),
    ],
)
def test_the_refusal_of_a_value_names_its_bounds(
    asked: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(asked)
    assert message in capsys.readouterr().err


def test_a_missing_key_file_is_not_an_error_before_the_first_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        app.main(["keys", "--state-dir", str(tmp_path), "list"])
    assert "no keys yet" in capsys.readouterr().err


def test_the_hint_for_a_missing_key_file_makes_that_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "own keys.json"
    with pytest.raises(SystemExit):
        app.main(["keys", "list", "--file", str(file)])
    assert f"pdmesh keys add TENANT --file '{file}'" in capsys.readouterr().err


def test_a_key_may_be_the_first_file_in_a_state_directory(tmp_path: Path) -> None:
    state_dir = tmp_path / "state"
    before = os.umask(0o022)
    try:
        with pytest.raises(SystemExit, match="0"):
            app.main(["keys", "add", "acme", "--state-dir", str(state_dir)])
    finally:
        os.umask(before)
    assert state_dir.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "words", [["up"], ["status"], ["events"], ["groups"], ["diff", "mesh.yaml"], ["pins", "list"]]
)
def test_every_command_takes_the_address_of_nats_from_the_environment(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The address contains a password. A command line would show it to everybody on the machine."""
    monkeypatch.setenv("PDMESH_NATS_URL", "nats://user:password@there:4222")
    assert build_parser().parse_args(words).nats_url == "nats://user:password@there:4222"
    here = [*words, "--nats-url", "nats://here:4222"]
    assert build_parser().parse_args(here).nats_url == "nats://here:4222"
    monkeypatch.setenv("PDMESH_NATS_URL", "")
    assert build_parser().parse_args(words).nats_url is None

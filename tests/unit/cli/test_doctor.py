"""The problems that `pdmesh doctor` finds, and the remedies that it names."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterable
from pathlib import Path

import pytest

from pdmesh.cli import app
from pdmesh.cli.commands.look.doctor import diagnoses_text
from pdmesh.cli.doctor import machine, mesh, settings
from pdmesh.cli.doctor.diagnosis import Diagnosis, Grade
from pdmesh.embedded.binaries import Program

OK, WARNING, PROBLEM = Grade.OK, Grade.WARNING, Grade.PROBLEM


def grades(diagnoses: Iterable[Diagnosis]) -> list[Grade]:
    return [each.grade for each in diagnoses]


def test_limits_that_are_too_low_for_a_mesh_are_warnings() -> None:
    assert machine.of_open_files(1024).grade is WARNING
    assert machine.of_open_files(65536).grade is OK
    assert machine.of_open_files(resource.RLIM_INFINITY).grade is OK
    assert machine.of_memory(2 * machine.GIB, "vllm").grade is WARNING
    assert machine.of_memory(2 * machine.GIB, "sim").grade is OK
    assert grades(machine.of_locked_memory(65536, ["mlx5_0"])) == [WARNING]
    assert grades(machine.of_locked_memory(65536, [])) == []


def test_a_port_that_another_process_holds_is_a_problem() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        found = machine.of_port(port)
    assert found.grade is PROBLEM
    assert str(port) in found.text
    assert machine.of_port(port).grade is OK


def test_a_missing_server_program_is_a_problem() -> None:
    nothing = Program({"no-such-server": (1, 0)}, "PDMESH_NO_SUCH", "no-such-wheel", "install it")
    assert machine.of_program("NATS", nothing).grade is PROBLEM


def test_rdma_that_ucx_cannot_use_is_a_warning() -> None:
    info = "# resource 0 : md 0 dev 0 flags -- self/memory\n# resource 1 : flags -- tcp/eth0\n"
    tcp = machine.transports_in(info)
    assert tcp == {"tcp"}
    assert machine.of_ucx(tcp, []).grade is OK
    assert machine.of_ucx(tcp, ["mlx5_0"]).grade is WARNING
    assert machine.of_ucx(tcp | {"rc_mlx5"}, ["mlx5_0"]).grade is OK
    assert machine.of_ucx("cannot be loaded: libucp.so.0", []).grade is PROBLEM


def test_a_processor_without_bf16_is_a_warning() -> None:
    assert machine.of_processor(frozenset({"avx2"})).grade is WARNING
    assert machine.of_processor(frozenset({"avx512_bf16"})).grade is OK


CONFIG = "PDMESH_GATEWAY_NATS_URL=nats://x\nPDMESH_GATEWAY_HTTP_PORT=8000\n"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("PDMESH_GATWAY_HTTP_PORT", "did you mean PDMESH_GATEWAY_HTTP_PORT?"),
        ("PDMESH_NATS_ULR", "did you mean PDMESH_NATS_URL?"),
    ],
)
def test_a_mistyped_variable_is_a_warning_with_the_one_that_was_meant(name: str, said: str) -> None:
    (found,) = settings.of_settings([(CONFIG, "")], {name: "1", "PATH": "/bin"})
    assert found.grade is WARNING
    assert said in found.text


def test_variables_that_some_process_reads_are_fine() -> None:
    environ = {
        "PDMESH_GATEWAY_HTTP_PORT": "1", "PDMESH_NATS_URL": "nats://x", "PDMESH_API_KEY": "k",
        "PDMESH_NODE_AGENT_PERIOD_S": "1", "PDMESH_GATEWAY_HTTP_PORT__NESTED": "1",
    }  # fmt: skip
    assert grades(settings.of_settings([(CONFIG, "")], environ)) == [OK]


def test_a_value_that_services_refuse_is_reported_once() -> None:
    error = "pdmesh-gateway: bad setting PDMESH_NATS_URL: no scheme"
    (found,) = settings.of_settings([("", error), ("", error)], {"PDMESH_NATS_URL": "x"})
    assert (found.grade, found.text) == (PROBLEM, error)


def test_each_missing_kind_of_service_is_a_problem() -> None:
    all_kinds = ["gateway", "master-scheduler", "kv-cache-index", "health-monitor", "decode"]
    assert grades(mesh.of_services(all_kinds)) == [OK]
    assert grades(mesh.of_services(["gateway"])) == [PROBLEM] * 3
    assert mesh.of_leader(None).grade is PROBLEM
    assert mesh.of_leader(3).grade is OK


def test_processes_of_several_releases_are_a_warning_that_names_the_few() -> None:
    assert mesh.of_versions({"gateway-0": "1", "decode-0": "1"}).grade is OK
    assert mesh.of_versions({}).grade is OK
    found = mesh.of_versions({"gateway-0": "2", "decode-0": "2", "prefill-0": "1"})
    assert (found.grade, found.remedy) == (WARNING, "update prefill-0")


def test_a_sick_instance_and_a_process_that_does_not_run_are_problems() -> None:
    healths = {"decode-0": "healthy", "prefill-0": "suspect, L3 DEVICE_RESET_REQUIRED"}
    found = list(mesh.of_health(healths, ["gateway-0 (waiting)"]))
    assert grades(found) == [PROBLEM, PROBLEM]
    assert found[1].remedy == "read its log: pdmesh logs gateway-0"
    assert grades(mesh.of_health({"decode-0": "healthy"}, [])) == [OK]


def test_a_clock_that_goes_wrong_is_a_warning() -> None:
    found = list(mesh.of_clocks({"gateway-0": 0.1, "decode-0": -90.0, "prefill-0": 5.0}))
    assert [each.text for each in found] == [
        "the clock of decode-0 is 90.0 s behind this machine's",
        "the clock of prefill-0 is 5.0 s ahead of this machine's",
    ]
    assert grades(mesh.of_clocks({"gateway-0": 0.1})) == [OK]


def test_a_person_reads_what_is_so_and_below_it_what_to_do() -> None:
    found = [machine.of_open_files(65536), machine.of_open_files(16)]
    first, second, remedy = diagnoses_text(found).splitlines()
    assert first == "ok    open files: 65536 at once"
    assert second == "warn  open files: a process may open only 16"
    assert remedy.startswith("        -> raise it: ulimit -n")


def test_a_file_that_cannot_be_a_desired_state_makes_it_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "groups.yaml"
    file.write_text("groups:\n  chat: {prefil: 1}\n")
    monkeypatch.setenv("PDMESH_HTTP_PORT", "0")
    monkeypatch.setenv("PDMESH_GRPC_PORT", "0")
    with pytest.raises(SystemExit) as ended:
        app.main(["doctor", "--engine", "sim", "--groups", str(file), "--state-dir", str(tmp_path)])
    assert ended.value.code == 1
    said = capsys.readouterr().out
    assert f"FAIL  groups: {file}: line 2" in said
    assert "no mesh runs here" in said

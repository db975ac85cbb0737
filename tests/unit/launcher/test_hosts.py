"""A mesh over several hosts is described by one file. Each host gets a folder."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from pdmesh.cli.app import main
from pdmesh.errors import InvalidRequest
from pdmesh.launcher.hosts.folder import BadHostFolder, HostFolder
from pdmesh.launcher.hosts.layout import read
from pdmesh.launcher.hosts.prepare import prepare
from pdmesh.launcher.spec import MeshSpec, planned_services

EXAMPLES = Path(__file__).parents[3] / "deploy/hosts"
THREE = (EXAMPLES / "hosts.yaml").read_text()


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.yaml")), ids=lambda f: f.name)
def test_the_examples_can_be_prepared_and_every_process_has_its_certificate(
    file: Path, tmp_path: Path
) -> None:
    layout = read(file.read_text())
    names = set()
    for path in prepare(layout, tmp_path, days=1):
        folder = HostFolder.read(path)
        for planned in planned_services(folder.spec(MeshSpec())):
            names.add(planned.name)
            assert (path / "tls" / planned.service / planned.name / "tls.crt").exists()
        for each in path.rglob("*"):
            assert each.is_dir() or stat.S_IMODE(each.stat().st_mode) == 0o600, each
        assert not list(path.rglob("ca.key"))
    counts = [sum((h.gateways, h.masters, h.prefill, h.decode)) for h in layout.hosts.values()]
    assert len(names) == sum(counts) + 2  # plus the index and the health-monitor


def test_a_host_knows_the_nearest_servers_first(tmp_path: Path) -> None:
    prepare(read(THREE), tmp_path, days=1)
    b = HostFolder.read(tmp_path / "b")
    assert b.nats_url == "tls://10.0.0.12:4222,10.0.0.11:4222,10.0.0.13:4222"
    url = b.redis_url("gateway")
    assert "@10.0.0.12:26379,10.0.0.11:26379,10.0.0.13:26379/0?primary=pdmesh" in url


def test_the_second_time_secrets_and_authority_stay(tmp_path: Path) -> None:
    prepare(read(THREE), tmp_path, days=1)
    before = HostFolder.read(tmp_path / "a").secrets
    authority = (tmp_path / "authority/mesh/ca.crt").read_bytes()
    more = THREE + "  d: {address: 10.0.0.14, decode: 1}\n"
    prepare(read(more), tmp_path, days=1)
    assert HostFolder.read(tmp_path / "d").secrets == before
    assert not HostFolder.read(tmp_path / "d").has_servers
    assert not (tmp_path / "d/accounts.conf").exists()
    assert "d-decode-0" in (tmp_path / "a/accounts.conf").read_text()
    assert (tmp_path / "authority/mesh/ca.crt").read_bytes() == authority


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("10.0.0.11", "localhost"), "hosts.a.address: must be an IP address"),
        (("10.0.0.11", "127.0.0.1"), "hosts.a.address: must be an address that the other hosts"),
        (("10.0.0.12", "10.0.0.11"), "hosts: 10.0.0.11 is the address of two hosts"),
        (("prefill: 1}", "prefil: 1}"), "hosts.a.prefil: "),
        (("masters: 1", "masters: -1"), "hosts.a.masters: "),
        (("health_monitor: true", "health_monitor: false"), "must have health_monitor: true"),
        (("  c: ", "  C: "), "hosts: 'C' is not a name"),
        (("  c: ", "  authority: "), "hosts: authority names a folder"),
        (("  c: ", "  admin: "), "hosts: admin names a folder"),
        (("hosts:", "servers: [a, b]\nhosts:"), "servers: 2 hosts, but a cluster needs 3 or 5"),
        (("hosts:", "servers: [a, b, x]\nhosts:"), "servers: x is not one of the hosts"),
        (("hosts:", "hosts: {"), "not YAML"),
    ],
)
def test_a_mistake_in_the_file_is_named(change: tuple[str, str], message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(THREE.replace(*change))
    assert message in caught.value.message


def test_a_folder_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadHostFolder, match=r"host.json: No such file"):
        HostFolder.read(tmp_path)
    (tmp_path / "host.json").write_text("{}")
    with pytest.raises(BadHostFolder, match="make it again with pdmesh hosts prepare"):
        HostFolder.read(tmp_path)


@pytest.mark.parametrize(
    "option",
    [
        "--prefill=2",
        "--nats-url=tls://x:1",
        "--redis-url=rediss://x:1",
        "--regions=a,b",
        "--fusion",
        "--blank=1",
        "--gateways=2",
        "--masters=2",
        "--node-agent",
    ],
)
def test_what_the_folder_says_is_no_option(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(read(THREE), tmp_path, days=1)
    arguments = ["up", "--engine", "sim", "--host-folder", str(tmp_path / "a"), option]
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert f"{option.partition('=')[0]}: not with --host-folder" in capsys.readouterr().err

"""The problems that `pdmesh doctor` finds in certificates.

`pdmesh doctor` checks the commands' own certificate and the certificates that the mesh's ports
show.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from pdmesh.cli.doctor.certificates import (
    Port,
    Shown,
    examine_ports,
    of_own,
    of_ports,
    own_certificate,
    ports_of,
)
from pdmesh.cli.doctor.diagnosis import Diagnosis, Grade
from pdmesh.core.access.process_identity import ProcessIdentity
from pdmesh.net.tls.certificate_renewal import CertificateFolder
from pdmesh.v1.common_pb2 import InstanceRecord
from tests.support.sites.certificates import TestAuthority

NOW = datetime(2026, 1, 1, tzinfo=UTC)
ANN = ProcessIdentity("operator", "ann")
PREFILL = Port("p-0", "127.0.0.1", 1, "p-0.prefill.pdmesh")


@pytest.fixture
def ours(tmp_path: Path) -> TestAuthority:
    return TestAuthority(tmp_path / "ours")


def test_without_tls_there_is_nothing_to_say() -> None:
    assert own_certificate("") == (None, [])


def test_files_that_cannot_be_used_are_a_problem(ours: TestAuthority) -> None:
    folder, (found,) = own_certificate(str(ours.issue("operator", "ann", days=-1)))
    assert folder is None
    assert found.grade is Grade.PROBLEM
    assert "tls.crt expired at" in found.text
    assert "pdmesh certs operator/NAME" in found.remedy


def test_the_commands_need_an_operator_s_certificate_that_lasts() -> None:
    late = NOW + timedelta(days=30)
    assert of_own(ANN, late, NOW).grade is Grade.OK
    assert of_own(ANN, NOW + timedelta(hours=5), NOW).grade is Grade.WARNING
    other = of_own(ProcessIdentity("prefill", "p-0"), late, NOW)
    assert (other.grade, "for prefill/p-0" in other.text) == (Grade.PROBLEM, True)


def test_the_ports_between_processes_are_examined_under_the_names_that_callers_check() -> None:
    records = [
        InstanceRecord(instance_id="p-0", service="prefill", grpc_address="[::1]:5"),
        InstanceRecord(instance_id="g-0", service="gateway", grpc_address="127.0.0.1:6"),
        InstanceRecord(instance_id="i-0", service="instance"),
    ]
    own = replace(ANN, trust_domain="example")
    assert list(ports_of(records, own, "tls://a:b@nats.example")) == [
        Port("nats", "nats.example", 4222, "nats.example"),
        Port("p-0", "::1", 5, "p-0.prefill.example"),
    ]
    assert list(ports_of([], own, "nats://a:b@nats.example")) == []


def test_ports_that_show_the_right_certificate_share_a_line() -> None:
    soon, late = NOW + timedelta(hours=2), NOW + timedelta(days=9)
    shown = [Shown(PREFILL, late), Shown(PREFILL, soon), Shown(PREFILL, None), Shown(PREFILL, late)]
    warned, fine = of_ports(shown, NOW)
    assert (warned.grade, fine.grade) == (Grade.WARNING, Grade.OK)
    assert fine.text == "2 ports show the right certificates; the first ends on 2026-01-10"


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[int]:
    """Run a server with the certificate of this folder. Yields its port."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(accept, "127.0.0.1", 0, ssl=context) as server:
        yield server.sockets[0].getsockname()[1]


async def seen_of(ours: TestAuthority, folder: Path) -> Diagnosis:
    async with serving(folder) as number:
        port = replace(PREFILL, number=number)
        own = CertificateFolder(ours.issue("operator", "ann"))
        (found,) = await examine_ports(own, [port])
    return found


async def test_a_port_is_told_by_what_is_wrong_with_its_certificate(
    ours: TestAuthority, tmp_path: Path
) -> None:
    fine = await seen_of(ours, ours.issue("prefill", "p-0", days=30))
    assert fine.grade is Grade.OK
    late = await seen_of(ours, ours.issue("prefill", "p-0", days=-1))
    assert "p-0 shows certificate has expired" in late.text
    other = await seen_of(ours, ours.issue("prefill", "p-1"))
    assert "must name p-0.prefill.pdmesh" in other.remedy
    theirs = TestAuthority(tmp_path / "theirs").issue("prefill", "p-0")
    strange = await seen_of(ours, theirs)
    assert strange.grade is Grade.PROBLEM
    assert "ca.crt" in strange.remedy


async def test_a_port_that_does_not_answer_is_left_to_others(ours: TestAuthority) -> None:
    async with serving(ours.issue("prefill", "p-0")) as number:
        pass
    own = CertificateFolder(ours.issue("operator", "ann"))
    assert await examine_ports(own, [replace(PREFILL, number=number)]) == []

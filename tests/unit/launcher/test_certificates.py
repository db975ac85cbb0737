"""The launcher makes the certificates of its mesh and renews them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from pdmesh.core.access.process_identity import ProcessIdentity, folder_of
from pdmesh.errors import BadCertificates
from pdmesh.launcher.certificates import MeshCertificates
from pdmesh.launcher.spec import ProcessSpec, StopOrder
from pdmesh.net.tls.certificate_renewal import CertificateFolder

SPEC = ProcessSpec("prefill-0", "prefill", StopOrder.INSTANCE, (), env={})
DAY = timedelta(days=1)


def test_certificates_are_renewed_when_less_than_a_third_of_their_life_is_left(
    tmp_path: Path,
) -> None:
    """Otherwise a mesh that runs for more than a year would lose every new connection."""
    now = [datetime.now(UTC)]
    mesh = MeshCertificates(tmp_path, [SPEC], "127.0.0.1", lambda: now[0])
    of_prefill = folder_of(tmp_path, ProcessIdentity("prefill", "prefill-0"))
    folders = [CertificateFolder(of_prefill), mesh.of_commands]
    first = [folder.latest() for folder in folders]
    now[0] += 240 * DAY
    mesh.renew()
    assert [folder.latest() for folder in folders] == first
    assert not mesh.has_nats_a_new_one()
    now[0] += 4 * DAY
    mesh.renew()
    second = [folder.latest() for folder in folders]
    assert all(old.chain != new.chain for old, new in zip(first, second, strict=True))
    assert [each.authorities for each in second] == [each.authorities for each in first]
    assert mesh.has_nats_a_new_one()
    mesh.renew()
    assert [folder.latest() for folder in folders] == second


def test_a_renewal_that_fails_is_tried_again(tmp_path: Path) -> None:
    now = [datetime.now(UTC)]
    mesh = MeshCertificates(tmp_path, [SPEC], "127.0.0.1", lambda: now[0])
    first, authority = mesh.of_commands.latest(), (tmp_path / "ca.crt").read_bytes()
    now[0] += 300 * DAY
    (tmp_path / "ca.crt").write_text("rubbish")
    with pytest.raises(BadCertificates):
        mesh.renew()
    assert mesh.of_commands.latest() is first
    (tmp_path / "ca.crt").write_bytes(authority)
    mesh.renew()
    assert mesh.of_commands.latest().chain != first.chain

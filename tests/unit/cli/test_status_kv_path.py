"""`pdmesh status` says where each instance's KV waits, and why."""

from __future__ import annotations

import pytest

from pdmesh.cli.commands.look.status import Status, _row, _text
from pdmesh.v1.common_pb2 import InstanceRecord, Role


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

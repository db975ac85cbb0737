"""Weights on storage behind a network or FUSE are read in file order.

A setting overrides that.
"""

from __future__ import annotations

import pytest

from pdmesh.core.loading.weights_loader import WeightsLoader, choose, filesystem_of

MOUNTS = """\
/dev/vda / ext4 rw 0 0
proc /proc proc rw 0 0
models:/x /mnt/mo\\040dels nfs4 rw 0 0
s3 /mnt/models fuse.s3fs ro 0 0
tmpfs /mnt/models/hot tmpfs rw 0 0
overlay /again ext4 rw 0 0
juice /again fuse rw 0 0
"""


@pytest.mark.req("S88")
@pytest.mark.parametrize("kind", ["fuse", "fuse.sshfs", "nfs4", "lustre", "virtiofs"])
def test_auto_reads_remote_storage_in_file_order(kind: str) -> None:
    choice = choose(WeightsLoader.AUTO, kind)
    assert choice.is_file_order
    assert kind in choice.reason


@pytest.mark.parametrize("kind", ["ext4", "xfs", "overlay", "tmpfs", "fuseblk", ""])
def test_auto_leaves_a_local_disk_to_vllm(kind: str) -> None:
    assert not choose(WeightsLoader.AUTO, kind).is_file_order


def test_the_setting_overrides_the_storage() -> None:
    assert choose(WeightsLoader.FILE_ORDER, "ext4").is_file_order
    assert not choose(WeightsLoader.VLLM, "fuse").is_file_order


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home/m", "ext4"),
        ("/mnt/models", "fuse.s3fs"),
        ("/mnt/models/llama", "fuse.s3fs"),
        ("/mnt/models2/llama", "ext4"),
        ("/mnt/models/hot/llama", "tmpfs"),
        ("/mnt/mo dels/llama", "nfs4"),
        ("/again/m", "fuse"),
    ],
)
def test_the_nearest_mount_holds_a_path(path: str, kind: str) -> None:
    assert filesystem_of(path, MOUNTS) == kind


def test_an_unknown_mount_table_says_nothing() -> None:
    assert filesystem_of("/m", "") == ""
    assert filesystem_of("/m", "broken line\n\n") == ""

"""Tests the tier that keeps KV blocks in files, on a real file system. The disk is small, then full
of other data, then free again, and then read-only. The disk is a tmpfs of 1 MB in a mount namespace
of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pdmesh.core.kv.tier import Tier
from pdmesh.core.kv.tiers.disk_health import DiskState
from pdmesh.kv.tiers.report import TierEvent
from tests.fakes.kv.tiers import (
    OWNER,
    Rig,
    data_of,
    fill,
    names_of,
    rig,
)
from tests.support import kv_bounds

_ENTER = ["unshare", "--user", "--map-root-user", "--mount"]


def _can_mount() -> bool:
    try:
        return subprocess.run([*_ENTER, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.fault("F33")
def test_the_file_tier_survives_a_full_disk_and_a_read_only_disk(tmp_path: Path) -> None:
    if not _can_mount():
        pytest.skip("no mount namespaces here")
    script = (
        f"mount -t tmpfs -o size=1m tmpfs {tmp_path} && exec {sys.executable} -m {__name__} "
        f"{tmp_path}"
    )
    done = subprocess.run(
        [*_ENTER, "sh", "-c", script], capture_output=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr.decode()
    lines = done.stdout.decode().splitlines()
    steps = [line.removeprefix("step: ") for line in lines if line.startswith("step: ")]
    took = {step.split()[0]: float(step.split()[-1]) for step in steps}
    assert list(took) == ["served", "full", "recovered", "read-only", "recovered-again"]
    for what in ("full", "read-only"):
        told = f"the disk of the file tier is {what}; time until the tier takes no more blocks"
        kv_bounds.judge("F33", told, took_s=took[what], bound_s=1.0)


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not is_so():
            await asyncio.sleep(0.01)


async def until_written(r: Rig, names: list[bytes]) -> None:
    """Wait until the tier accepts blocks again. After a failure, the tier waits for some time
    before it tries the disk again.
    """
    r.clock.skipped_s += 60.0
    fill(r.pool, names)
    r.stack.stored(names)
    await until(lambda: not r.files.num_waiting)
    assert r.files.state is DiskState.OK
    assert r.store.contains(names, OWNER) == (1 << len(names)) - 1


async def check_served(r: Rig, names: list[bytes], count: int) -> None:
    """Assert that the file tier returns `count` of the blocks, each correct to the last byte."""
    r.pool.clear()
    lease = await r.stack.fetch(names, OWNER, 0, 10.0)
    assert len(lease.blocks) == count
    assert set(lease.tiers) == {Tier.FILE}
    assert all(np.array_equal(b.data, data_of(b.name)) for b in lease.blocks)
    lease.close()


async def scenario(folder: Path) -> None:
    r = rig(folder, num_slots=512)
    names = names_of(*range(400))  # these blocks have 2 MB together
    fill(r.pool, names)
    r.stack.stored(names[:256])
    await until(lambda: not r.files.num_waiting)
    assert r.files.state is DiskState.OK, (
        "on a disk smaller than the quota, the tier evicts blocks to continue"
    )
    assert r.counts.total(Tier.FILE, TierEvent.FAILED) == 0
    assert r.counts.total(Tier.FILE, TierEvent.STORED) == 256
    assert 100 < len(list(folder.rglob("*.kv"))) < 256
    assert not list(folder.rglob(".writing-*")), "no half block stays"
    await check_served(r, names[250:256], 6)
    print("step: served 0")

    for path in folder.rglob("*.kv"):
        path.unlink()
    with contextlib.suppress(OSError), (folder / "others").open("wb", buffering=0) as others:
        while True:
            others.write(bytes(512))
    fill(r.pool, names[300:310])
    began = time.monotonic()
    r.stack.stored(names[300:310])
    await until(lambda: r.files.state is DiskState.READ_ONLY)
    full_s = time.monotonic() - began
    await until(lambda: not r.files.num_waiting)
    assert r.files.state is DiskState.READ_ONLY
    assert r.counts.total(Tier.FILE, TierEvent.FAILED) == 1, (
        "the disk was tried once and then not used"
    )
    print("step: full", full_s)

    (folder / "others").unlink()
    await until_written(r, names_of(999))
    print("step: recovered 0")

    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    fill(r.pool, names_of(1000))
    began = time.monotonic()
    r.stack.stored(names_of(1000))
    await until(lambda: r.files.state is DiskState.READ_ONLY)
    read_only_s = time.monotonic() - began
    await until(lambda: not r.files.num_waiting)
    assert r.files.state is DiskState.READ_ONLY
    await check_served(r, names_of(999), 1)
    print("step: read-only", read_only_s)
    subprocess.run(["mount", "-o", "remount,rw", str(folder)], check=True)
    await until_written(r, names_of(1001))
    print("step: recovered-again 0")
    await r.stack.close()
    assert r.pool.num_pinned == 0


if __name__ == "__main__":
    asyncio.run(scenario(Path(sys.argv[1])))
    os._exit(0)

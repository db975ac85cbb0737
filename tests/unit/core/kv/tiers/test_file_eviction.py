"""Tests which KV files are evicted first, and how many."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdmesh.core.kv.tiers.file_eviction import (
    KEPT_SHARE,
    LOW_WATER,
    FullDisk,
    StoredFile,
    eviction_order,
    first_use,
    room_for,
    room_on_full_disk,
)

NOW, QUOTA = 1000.0, 100


def file(name: str, used_at: float, owner: str = "x", num_bytes: int = 10) -> StoredFile:
    return StoredFile(Path("/kv/id") / owner / "ab" / f"{name}.kv", num_bytes, used_at)


def order(*files: StoredFile, owner_share: float = 1.0) -> list[str]:
    return [each.path.stem for each in eviction_order(files, NOW, QUOTA, owner_share)]


@pytest.mark.req("S105")
def test_the_least_recently_used_file_goes_first_and_the_name_decides_between_equals() -> None:
    assert order(file("b2", 20.0), file("a1", 30.0), file("b1", 20.0)) == ["b1", "b2", "a1"]


@pytest.mark.req("S105")
def test_files_of_an_owner_beyond_its_share_go_before_older_files_of_others() -> None:
    greedy = [file(f"a{i}", 50.0 + i, "greedy") for i in range(4)]
    modest = file("b0", 1.0, "modest")
    assert order(*greedy, modest, owner_share=0.2) == ["a0", "a1", "b0", "a2", "a3"]


@pytest.mark.req("S105")
def test_a_kept_file_goes_only_if_kept_files_leave_too_little_to_others() -> None:
    few = [file(f"a{i}", NOW + 1 + i) for i in range(7)]
    assert sum(f.num_bytes for f in few) <= KEPT_SHARE * QUOTA
    assert order(*few, file("b0", 5.0)) == ["b0"]
    many = [*few, file("a7", NOW + 8), file("a8", NOW + 9)]
    assert order(*many, file("b0", 5.0)) == ["b0", "a8", "a7"], "the latest time first"


def test_the_end_of_a_prompt_is_older_than_its_beginning() -> None:
    uses = [first_use(NOW, position) for position in range(3)]
    assert uses == sorted(uses, reverse=True)
    assert uses[0] == NOW


def test_eviction_leaves_room_for_more_than_one_file() -> None:
    assert room_for(10, QUOTA) == int(LOW_WATER * QUOTA) - 10
    assert room_on_full_disk(10, 1000) == 900, "a tenth, at the low-water mark"
    assert room_on_full_disk(30, 100) == 70, "at least the file's own size"


@pytest.mark.fault("F33")
def test_a_full_disk_evicts_once_until_a_block_was_written() -> None:
    disk = FullDisk()
    assert [disk.may_evict() for _ in range(3)] == [True, False, False]
    disk.written()
    assert [disk.may_evict() for _ in range(2)] == [True, False]

"""Adapters are copied, verified, loaded and unloaded in the background.

Each leg that asks for an adapter gets one answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from pdmesh.core.adapters.adapter import Adapter
from pdmesh.engine.adapters import files
from pdmesh.engine.adapters.adapter_host import AdapterHost, AdapterLimits
from pdmesh.engine.adapters.files import SETTINGS_FILE, read_adapter
from pdmesh.engine.base import AdaptersChanged
from pdmesh.errors import AdapterMisfit, AdapterUnusable
from tests.fakes.lora_adapters import write_adapter
from tests.support.waiting import until


class Slots:
    """Records which adapters are loaded, with the digest of the content in each one's folder."""

    def __init__(self) -> None:
        self.loaded: dict[str, str] = {}
        self.refuses = ""

    async def load(self, digest: str, folder: Path) -> None:
        await asyncio.sleep(0)
        if self.refuses:
            raise AdapterUnusable(self.refuses)
        self.loaded[digest] = (await asyncio.to_thread(read_adapter, folder)).digest

    async def unload(self, digest: str) -> None:
        await asyncio.sleep(0)
        del self.loaded[digest]


class Site:
    def __init__(self, folder: Path) -> None:
        self.folder, self.slots = folder, Slots()
        self.changes: list[AdaptersChanged] = []
        self.errors: list[BaseException] = []
        limits = AdapterLimits(num_slots=1, max_rank=8)
        self.host = AdapterHost(
            limits, self.slots, folder / "own", self.changes.append, self.errors.append
        )

    def adapter(self, name: str, seed: int, rank: int = 4) -> Adapter:
        path = self.folder / name
        return Adapter(name, write_adapter(path, seed, rank=rank), str(path))


@pytest_asyncio.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    site = Site(tmp_path)
    yield site
    await site.host.stop()
    assert site.errors == []
    assert not (tmp_path / "own").exists()


async def test_an_adapter_is_loaded_from_a_copy_of_what_was_verified(site: Site) -> None:
    a = site.adapter("a", 1)
    await site.host.acquired(1, a)
    assert site.slots.loaded == {a.digest: a.digest}
    assert site.changes[-1].loaded == (a.digest,)
    assert not site.host.is_idle
    assert site.host.release(1)
    assert not site.host.release(1)
    assert site.host.is_idle


async def test_content_other_than_the_registered_one_is_refused(site: Site) -> None:
    a = site.adapter("a", 1)
    settings = Path(a.path) / SETTINGS_FILE
    settings.write_text(settings.read_text() + " ")
    with pytest.raises(AdapterUnusable, match="has changed since it was registered"):
        await site.host.acquired(1, a)
    assert site.slots.loaded == {}
    assert site.changes == [AdaptersChanged((), "failed")]
    assert site.host.is_idle


async def test_later_changes_of_the_folder_have_no_effect(site: Site) -> None:
    a, b = site.adapter("a", 1), site.adapter("b", 2)
    await site.host.acquired(1, a)
    (Path(a.path) / SETTINGS_FILE).unlink()
    await site.host.acquired(2, a)
    site.host.release(1)
    site.host.release(2)
    await site.host.acquired(3, b)
    assert site.slots.loaded == {b.digest: b.digest}
    assert [c.event for c in site.changes] == ["loaded", "unloaded", "loaded"]
    assert [p.name for p in (site.folder / "own").iterdir()] == [b.digest]
    site.host.release(3)


async def test_each_refusal_has_its_reason_and_another_adapter_is_served(site: Site) -> None:
    missing = Adapter("gone", "0" * 64, str(site.folder / "nowhere"))
    with pytest.raises(AdapterUnusable, match=r"adapter gone: cannot read .*No such file"):
        await site.host.acquired(1, missing)
    large = site.adapter("large", 1, rank=16)
    with pytest.raises(AdapterUnusable, match="r is 16; the highest rank here is 8"):
        await site.host.acquired(2, large)
    with pytest.raises(AdapterUnusable, match="r is 16"):
        await site.host.inspect(large.path)
    a = site.adapter("a", 1)
    site.slots.refuses = "no such layer"
    with pytest.raises(AdapterUnusable, match="no such layer"):
        await site.host.acquired(3, a)
    site.slots.refuses = ""
    with pytest.raises(AdapterUnusable, match="no such layer"):
        await site.host.acquired(4, a)
    assert (await site.host.inspect(a.path)).digest == a.digest
    await site.host.acquired(5, a)
    site.host.release(5)


async def test_an_unusable_adapter_takes_no_slot_and_is_read_once(site: Site) -> None:
    a, large = site.adapter("a", 1), site.adapter("large", 1, rank=16)
    await site.host.acquired(1, a)
    site.host.release(1)
    with pytest.raises(AdapterUnusable, match="r is 16"):
        await site.host.acquired(2, large)
    num_signs = site.host.num_signs
    for leg in range(3, 50):
        with pytest.raises(AdapterUnusable, match="r is 16"):
            await site.host.acquired(leg, large)
    assert site.host.num_signs == num_signs, "nothing was read"
    assert site.slots.loaded == {a.digest: a.digest}
    assert [c.event for c in site.changes] == ["loaded", "failed"]
    assert [p.name for p in (site.folder / "own").iterdir()] == [a.digest]


async def test_a_refusal_says_whether_another_instance_could_load_the_adapter(site: Site) -> None:
    """Otherwise gateways would ask one instance after another for an adapter that fits none of
    them.
    """
    path = site.folder / "dora"
    dora = Adapter("dora", write_adapter(path, 1, use_dora=True), str(path))
    large = site.adapter("large", 1, rank=16)
    for leg in (1, 2):  # the second leg gets the reason from the memory of failures
        with pytest.raises(AdapterMisfit, match="use_dora is not supported"):
            await site.host.acquired(leg, dora)
        with pytest.raises(AdapterUnusable, match="r is 16") as told:
            await site.host.acquired(leg + 10, large)
        assert not isinstance(told.value, AdapterMisfit)


async def test_a_copy_that_cannot_be_made_ends_only_its_own_legs(site: Site) -> None:
    a = site.adapter("a", 1)
    (site.folder / "own").write_text("in the way")
    with pytest.raises(AdapterUnusable, match=r"cannot make .*own: File exists"):
        await site.host.acquired(1, a)
    assert site.host.is_idle
    (site.folder / "own").unlink()


async def test_each_piece_that_is_copied_is_a_sign_of_work(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copying a large adapter from a slow store takes long. The legs that wait for the copy must
    not be lost.
    """
    monkeypatch.setattr(files, "_PIECE", 1000)
    a, b = site.adapter("a", 1), site.adapter("b", 2)
    size = sum(path.stat().st_size for path in Path(a.path).iterdir())
    await site.host.acquired(1, a)
    assert site.host.num_signs >= size // 1000
    before = site.host.num_signs
    site.host.release(1)
    await site.host.acquired(2, b)
    assert site.host.num_signs >= before + size // 1000
    site.host.release(2)


async def test_a_removed_adapter_is_unloaded_when_no_leg_uses_it(site: Site) -> None:
    a = site.adapter("a", 1)
    await site.host.acquired(1, a)
    site.host.keep([])
    assert a.digest in site.slots.loaded
    site.host.release(1)
    await until(lambda: site.changes[-1] == AdaptersChanged((), "unloaded"))
    assert site.slots.loaded == {}


async def test_a_leg_that_left_before_its_turn_gets_no_answer(site: Site) -> None:
    a, b = site.adapter("a", 1), site.adapter("b", 2)
    told: list[str] = []
    await site.host.acquired(1, a)
    site.host.acquire(2, b, lambda: told.append("ready"), lambda e: told.append(e.message))
    site.host.release(2)
    site.host.release(1)
    assert told == []
    assert site.host.is_idle
    assert a.digest in site.slots.loaded

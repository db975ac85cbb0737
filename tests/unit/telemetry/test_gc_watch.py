"""Pauses for garbage collection are recorded by generation, in whichever thread they happen."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Mapping

from pdmesh.service_process import collect_everything, exclude_from_collection
from pdmesh.telemetry.gc_watch import GcWatch

Pause = tuple[float, str]


def watch(times: list[float]) -> tuple[GcWatch, list[Pause]]:
    found: list[Pause] = []

    def record(seconds: float, labels: Mapping[str, str]) -> None:
        found.append((seconds, labels["generation"]))

    return GcWatch(iter(times).__next__, record), found


def test_a_pause_lasts_from_its_start_to_its_stop() -> None:
    noted, found = watch([1.0, 1.25, 5.0, 7.0])
    noted("stop", {"generation": 1})  # the collection began before the watch
    for generation in (0, 2):
        noted("start", {"generation": generation})
        noted("stop", {"generation": generation})
    assert found == [(0.25, "0"), (2.0, "2")]


def test_it_sees_the_collections_of_all_threads_while_it_runs() -> None:
    noted, found = watch(list(map(float, range(1000))))
    noted.start()
    try:
        for generation in range(3):
            thread = threading.Thread(target=gc.collect, args=(generation,))
            thread.start()
            thread.join()
    finally:
        noted.stop()
    gc.collect()
    assert {generation for _, generation in found} == {"0", "1", "2"}
    assert len([each for each in found if each[1] == "2"]) == 1, "none after the stop"


class Loaded:
    """An object in a reference cycle, so that only a collection frees it."""

    def __init__(self) -> None:
        self.itself = self


def test_what_is_excluded_is_visited_by_no_collection_until_everything_is_collected() -> None:
    """A collection that visits an engine's libraries would stop an instance for long. Still, an
    incarnation must leave nothing behind when it ends.
    """
    gone: list[int] = []
    loaded = Loaded()
    weakref.finalize(loaded, gone.append, 1)
    try:
        assert any(each is loaded for each in gc.get_objects())
        exclude_from_collection()
        assert not any(each is loaded for each in gc.get_objects())
        del loaded
        gc.collect()
        assert gone == []
        collect_everything()
        assert gone == [1]
        assert gc.get_freeze_count() > len(gc.get_objects())
    finally:
        gc.unfreeze()

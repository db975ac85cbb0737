"""vLLM's names for an adapter are made from its content. A refusal has a reason of one line."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pdmesh.engine.vllm.host.adapters import VllmSlots, slot_id
from pdmesh.errors import AdapterUnusable

A, B = "0" * 64, "f" * 64


class Llm:
    """Stands in for vLLM, which takes every adapter unless `refuses` has a reason."""

    def __init__(self) -> None:
        self.added: list[Any] = []
        self.removed: list[int] = []
        self.refuses = ""

    async def add_lora(self, request: Any) -> bool:
        if self.refuses:
            raise ValueError(self.refuses)
        self.added.append(request)
        return True

    async def remove_lora(self, number: int) -> bool:
        self.removed.append(number)
        return True


@pytest.fixture(autouse=True)
def vllm_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the two names of vLLM that are used here, because importing vLLM takes seconds."""

    def request(lora_name: str, lora_int_id: int, lora_path: str) -> SimpleNamespace:
        return SimpleNamespace(name=lora_name, id=lora_int_id, path=lora_path)

    names = {"vllm.lora.request": ("LoRARequest", request)}
    names["vllm.v1.engine.exceptions"] = (
        "EngineDeadError",
        type("EngineDeadError", (Exception,), {}),
    )
    for module, (name, value) in names.items():
        parts = module.split(".")
        for at in range(1, len(parts) + 1):
            path = ".".join(parts[:at])
            monkeypatch.setitem(sys.modules, path, ModuleType(path))
        setattr(sys.modules[module], name, value)


def test_a_slot_is_a_positive_number_of_63_bits() -> None:
    assert 0 < slot_id(A) < slot_id(B) < 1 << 62


async def test_equal_content_has_equal_names_and_different_content_different_ones() -> None:
    llm = Llm()
    slots = VllmSlots(llm)
    await slots.load(A, Path("/own/a"))
    await slots.load(B, Path("/own/b"))
    await slots.unload(A)
    await slots.load(A, Path("/own/a"))
    first, other, again = llm.added
    assert (first.name, first.id, first.path) == (again.name, again.id, again.path)
    assert (first.name, first.id) != (other.name, other.id)
    assert llm.removed == [first.id]
    assert slots.request_of(A) is again


async def test_two_adapters_whose_numbers_collide_are_not_loaded_together() -> None:
    slots = VllmSlots(Llm())
    await slots.load(A, Path("/own/a"))
    with pytest.raises(AdapterUnusable, match="60 bits"):
        await slots.load(A[:-1] + "1", Path("/own/b"))


async def test_vllms_own_error_is_reported_in_one_line() -> None:
    llm = Llm()
    llm.refuses = "Traceback ...\n  File ...\nValueError: DoRA\n"
    slots = VllmSlots(llm)
    with pytest.raises(AdapterUnusable) as refused:
        await slots.load(A, Path("/own/a"))
    assert refused.value.message == "vLLM refused it: ValueError: DoRA"
    llm.refuses = ""
    await slots.load(A, Path("/own/a"))

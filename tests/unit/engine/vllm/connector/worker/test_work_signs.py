"""A vLLM worker sends signs of work during a step, so that it is not taken for a hung worker.

The number of signs per second is bounded.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pdmesh.engine.vllm.connector.worker.work_signs import (
    EVERY_S,
    WorkSigns,
    sign_adapter_loads,
)
from pdmesh.engine.vllm.messages import RankMessage, Working, decode_to_host, encode_frame

pytestmark = pytest.mark.req("S33")


class Host:
    def __init__(self) -> None:
        self.now = 100.0
        self.heard: list[Working] = []
        self.signs = WorkSigns(1, self.hear, lambda: self.now)

    def hear(self, message: RankMessage) -> None:
        assert decode_to_host(encode_frame(message)[4:]) == message
        assert isinstance(message, Working)
        self.heard.append(message)


def test_a_long_step_gives_a_sign_with_each_layer() -> None:
    host = Host()
    host.signs.step(512)
    for _ in range(3):
        host.now += 5.0
        host.signs.layer()
    assert host.heard == [Working(1, number, 512) for number in (1, 2, 3, 4)]


def test_short_steps_give_a_sign_a_few_times_a_second() -> None:
    host = Host()
    num_steps = 1000
    for _ in range(num_steps):
        host.signs.step(8)
        for _ in range(30):
            host.signs.layer()
        host.now += 0.002
    seconds = num_steps * 0.002
    assert seconds / EVERY_S - 1 <= len(host.heard) <= seconds / EVERY_S + 1
    signs = [word.num_signs for word in host.heard]
    assert signs == sorted(set(signs)), "each sign says something new"


def test_a_step_that_computes_nothing_is_no_sign_of_work() -> None:
    """vLLM runs empty steps all the time while every request waits for its KV."""
    host = Host()
    for _ in range(10):
        host.signs.step(0)
        host.now += 5.0
    assert not host.heard


def test_each_layer_of_an_adapter_that_is_loaded_is_a_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = pytest.importorskip("vllm.lora.lora_weights").LoRALayerWeights
    manager = pytest.importorskip("vllm.lora.model_manager").LoRAModelManager
    helper = pytest.importorskip("vllm.lora.peft_helper").PEFTHelper(4, 8, ["q_proj"])
    for kind, name in ((weights, "from_config"), (manager, "_get_lora_layer_weights")):
        # so that the original is restored after the test
        monkeypatch.setattr(kind, name, vars(kind)[name])
    signs: list[None] = []
    sign_adapter_loads(lambda: signs.append(None))
    for number in range(3):
        assert weights.from_config(f"layer{number}", helper, "q_proj").rank == 4
        assert len(signs) == 2 * number + 1
        nothing = SimpleNamespace(get_lora=lambda name: None)
        unpacked = SimpleNamespace(is_pooling_model=False, supported_modules_to_save=())
        assert manager._get_lora_layer_weights(unpacked, nothing, f"layer{number}") is None
        assert len(signs) == 2 * number + 2

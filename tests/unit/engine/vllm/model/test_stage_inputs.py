"""A later pipeline stage has memory for its inputs even if vLLM never profiled the model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
runners = pytest.importorskip("vllm.v1.worker.gpu_model_runner")

from pdmesh.engine.vllm.model.stage_inputs import make_room_for_inputs  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")  # vLLM itself raises these warnings


@pytest.mark.req("S120")
def test_room_is_made_once_and_inputs_are_copied_into_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.sequence import IntermediateTensors

    runner_class = runners.GPUModelRunner
    name = "sync_and_gather_intermediate_tensors"
    monkeypatch.setattr(runner_class, name, getattr(runner_class, name))
    asked: list[dict[str, Any]] = []

    def empty(**sizes: Any) -> Any:
        asked.append(sizes)
        return IntermediateTensors({"hidden": torch.zeros(sizes["batch_size"], 2)})

    runner = SimpleNamespace(
        intermediate_tensors=None,
        model=SimpleNamespace(make_empty_intermediate_tensors=empty),
        model_config=SimpleNamespace(dtype=torch.float32),
        max_num_tokens=8,
        device=torch.device("cpu"),
    )
    sent = IntermediateTensors({"hidden": torch.ones(3, 2)})
    # vLLM without the patch; if it raises nothing, the patch can be removed
    with pytest.raises(AssertionError):
        runner_class.sync_and_gather_intermediate_tensors(runner, 3, sent, True)
    make_room_for_inputs()
    make_room_for_inputs()
    for _ in range(2):
        got = runner_class.sync_and_gather_intermediate_tensors(runner, 3, sent, True)
        assert got["hidden"].tolist() == [[1.0, 1.0]] * 3
    assert asked == [{"batch_size": 8, "dtype": torch.float32, "device": torch.device("cpu")}]

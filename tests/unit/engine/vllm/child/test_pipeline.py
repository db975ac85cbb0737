"""Settings that a pipeline does not support are refused in one line before anything starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from pdmesh.core.speculation.proposal_length import Speculation
from pdmesh.engine.vllm.child.pipeline import check_pipeline, check_stages
from pdmesh.engine.vllm.config import VllmConfig
from pdmesh.errors import EngineMisconfigured

ONE = VllmConfig("prefill-0", 1, Path("model"), "m", device="cpu")
TWO = replace(ONE, pipeline_parallel_size=2)


@pytest.mark.req("S120")
def test_speculation_and_images_need_one_stage(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vision_config": {}}')
    check_pipeline(TWO)
    for changes, cause in (
        ({"speculation": Speculation(4, 0.6, 0.01)}, "speculation"),
        ({"model_dir": tmp_path}, "reads images"),
    ):
        check_pipeline(replace(ONE, **changes))
        with pytest.raises(EngineMisconfigured, match=cause) as refused:
            check_pipeline(replace(TWO, **changes))
        assert refused.value.message.startswith("pipeline_parallel_size: 2 ")
        assert "\n" not in refused.value.message
        assert (refused.value.reason, refused.value.field) == (
            "BAD_OPTION",
            "pipeline_parallel_size",
        )


@pytest.mark.req("S120")
def test_there_are_no_more_stages_than_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm.distributed.utils")

    def vllm_config(num_layers: int) -> SimpleNamespace:
        return SimpleNamespace(
            model_config=SimpleNamespace(get_total_num_hidden_layers=lambda: num_layers),
            parallel_config=SimpleNamespace(pipeline_parallel_size=3),
        )

    check_stages(vllm_config(3))
    with pytest.raises(EngineMisconfigured, match="3 is too many stages for a model of 2 layers"):
        check_stages(vllm_config(2))
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "1,2")
    with pytest.raises(EngineMisconfigured, match=r"VLLM_PP_LAYER_PARTITION: .*pp_size=3"):
        check_stages(vllm_config(3))

"""The step times of accelerators scale as the roofline model says, and are near measurements."""

from __future__ import annotations

import pytest

from loadtests.sizing.scenes import CONFIGS
from pdmesh.core.sizing.accelerators import ACCELERATORS, accelerator
from pdmesh.core.sizing.efficiency import EFFICIENCIES
from pdmesh.core.sizing.model_shape import model_shape
from pdmesh.core.sizing.problem import SizingProblem
from pdmesh.core.sizing.roofline import efficiency_of, law_notes, law_of

SMALL, LARGE = model_shape(CONFIGS["Llama-3.1-8B"]), model_shape(CONFIGS["Llama-3.1-70B"])
EXPERTS = model_shape(CONFIGS["Qwen3-30B-A3B"])
H100 = accelerator("h100")


@pytest.mark.parametrize(
    ("gpu", "tokens", "prefill_ms", "batch", "context", "step_ms"),
    [  # measured by aiconfigurator 0.12 with vLLM 0.24 and Llama-3.1-8B on one GPU
        ("h100", 4096, 90.1, 64, 2048, 12.6),
        ("a100", 4096, 258.7, 64, 8192, 58.6),
        ("l40s", 2048, 144.9, 32, 8192, 77.8),
        ("b200", 8192, 97.5, 128, 8192, 22.9),
    ],
)
def test_laws_are_near_the_measured_steps(
    gpu: str, tokens: int, prefill_ms: float, batch: int, context: int, step_ms: float
) -> None:
    law = law_of(SMALL, accelerator(gpu), 1)
    assert 1000 * law.prefill_s(tokens) == pytest.approx(prefill_ms, rel=0.15)
    assert 1000 * law.step_s(batch, batch * context) == pytest.approx(step_ms, rel=0.15)


def test_a_mixed_step_is_near_the_measured_one() -> None:
    law = law_of(SMALL, H100, 1)
    assert 1000 * law.mixed_s(law.prefill_s(2048), 64, 64 * 2048) == pytest.approx(50.9, rel=0.1)


def test_no_engine_is_faster_than_its_peaks() -> None:
    for gpu in ACCELERATORS:
        device = accelerator(gpu)
        law = law_of(SMALL, device, 1)
        assert law.prefill_s(4096) > 2 * SMALL.active_params * 4096 / device.bf16_flops
        assert law.step_s(1, 1) > SMALL.dense_bytes / device.memory_bandwidth


def test_more_ranks_are_faster_but_not_as_many_times() -> None:
    one, four = law_of(LARGE, H100, 2), law_of(LARGE, H100, 8)
    assert 1 < one.prefill_s(8192) / four.prefill_s(8192) < 4
    assert 1 < one.step_s(32, 65_536) / four.step_s(32, 65_536) < 4


def test_a_small_batch_reads_few_experts() -> None:
    law = law_of(EXPERTS, H100, 1)
    assert law.step_s(1, 0) < 0.4 * law.step_s(64, 0)
    assert law.expert_share == 8 / 128


def test_kinds_that_were_not_measured_say_so() -> None:
    assert "MI300X".lower() in law_notes(SMALL, accelerator("mi300x"), 1)[1]
    assert len(law_notes(SMALL, H100, 1)) == 1
    assert "all-reduces" in law_notes(SMALL, accelerator("l40s"), 2)[-1]
    share, key = efficiency_of(EXPERTS, accelerator("l40s"))
    assert (key, share) == (("h100", "bf16", "moe"), EFFICIENCIES["h100", "bf16", "moe"])


def test_weights_need_a_unit_that_multiplies_them() -> None:
    fp8 = model_shape({**CONFIGS["Llama-3.1-8B"], "quantization_config": {"quant_method": "fp8"}})
    with pytest.raises(SizingProblem, match="a100 has no fp8 unit"):
        law_of(fp8, accelerator("a100"), 1)

"""Known accelerators name the source of their figures. Others are described by hand."""

from __future__ import annotations

import pytest

from pdmesh.core.sizing.accelerators import ACCELERATORS, accelerator
from pdmesh.core.sizing.problem import SizingProblem


@pytest.mark.parametrize("name", ACCELERATORS)
def test_every_known_one_is_whole_and_says_its_source(name: str) -> None:
    device = accelerator(name.upper())
    assert "data sheet" in device.source
    # Another number of operations per byte would be a wrong unit.
    assert 50 < device.bf16_flops / device.memory_bandwidth < 500
    assert 20 < device.memory_bytes / 2**30 < 200
    assert device.link_bandwidth > 1e10 < device.network_bandwidth * 2


def test_a_custom_one_changes_a_known_one_or_stands_alone() -> None:
    more = accelerator("custom:h100,memory_gib=94")
    assert more.memory_bytes == 94 * 2**30
    assert more.bf16_flops == ACCELERATORS["h100"].bf16_flops
    own = accelerator("custom:bf16_tflops=400,memory_gib=64,memory_gbs=1600,network_gbs=25")
    assert (own.bf16_flops, own.network_bandwidth) == (400e12, 25e9)
    assert own.flops("fp8") == 0


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("h20", "did you mean h200"),
        ("tpu", "known: a100"),
        ("custom:bf16_tflops=1", "needs memory_gib, memory_gbs"),
        ("custom:h100,memory=94", "memory_gib"),
        ("custom:h100,memory_gib=lots", "memory_gib: must be a positive number"),
        ("custom:h1000,memory_gib=9", "there is no 'h1000'"),
    ],
)
def test_a_wrong_one_is_refused_by_the_field(text: str, told: str) -> None:
    with pytest.raises(SizingProblem, match=told) as refused:
        accelerator(text)
    assert refused.value.field == "gpu"

"""What is said if vLLM does not start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pdmesh.engine.vllm.child.startup import build, missing_library
from pdmesh.engine.vllm.host.stats import SchedulerView
from pdmesh.errors import EngineFailed

pytestmark = pytest.mark.filterwarnings("default")  # vLLM's own
# As transformers says it: several lines, the first one empty.
TORCHVISION = """
Qwen2VLVideoProcessor requires the Torchvision library but it was not found in your environment.
Please restart your runtime after installation.
"""


@pytest.mark.req("S129")
def test_a_missing_library_is_named_in_one_line() -> None:
    said = missing_library(ImportError(TORCHVISION))
    assert "needs torchvision" in said
    assert "docs/images.md" in said
    assert "\n" not in said
    assert "No module named 'timm'" in missing_library(ImportError("No module named 'timm'\nmore"))


@pytest.mark.req("S129")
def test_it_ends_the_start_as_other_causes_do(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = pytest.importorskip("vllm.engine.arg_utils")

    def fail(*_: object, **__: object) -> Callable[[], None]:
        raise ImportError(TORCHVISION)

    monkeypatch.setattr(arguments, "AsyncEngineArgs", fail)
    with pytest.raises(EngineFailed, match="needs torchvision") as failed:
        build({"model": str(Path())}, SchedulerView(), lambda: True)
    assert failed.value.reason == "ENGINE_MISSING"

"""The error if vLLM does not start, and whether the start is tried again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import BaseModel, field_validator

from pdmesh.engine.vllm.child.startup import build, engine_config, missing_library
from pdmesh.engine.vllm.host.stats import SchedulerView
from pdmesh.errors import EngineFailed, EngineMisconfigured

pytestmark = pytest.mark.filterwarnings("default")  # importing vLLM gives warnings
# The error text of transformers has several lines, and the first one is empty.
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


class _Arguments(BaseModel):
    """Stands in for vLLM's arguments.

    Pydantic checks the fields, and `create_engine_config` then checks the arguments as a whole.
    """

    seed: int = 0
    block_size: int = 16

    @field_validator("block_size")
    @classmethod
    def known(cls, value: int) -> int:
        if value % 8:
            raise ValueError("must be a multiple of 8")
        return value

    def create_engine_config(self) -> _Arguments:
        if self.seed == 7:
            raise ValueError("seed 7 is taken\nmore")
        if self.seed == 8:
            raise OSError("the disk is away")
        return self


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"block_size": 9}, r"block_size: Value error, must be a multiple of 8"),
        ({"seed": "x", "block_size": 9}, r"seed: .*; block_size: "),
        ({"seed": 7}, r"ValueError: seed 7 is taken\)"),
    ],
)
def test_arguments_that_vllm_refuses_are_named_and_are_not_tried_again(
    arguments: dict[str, object], said: str
) -> None:
    with pytest.raises(EngineMisconfigured, match=said) as refused:
        engine_config(_Arguments, arguments)
    assert "\n" not in refused.value.message
    assert engine_config(_Arguments, {"seed": 1}).seed == 1


def test_a_failure_that_may_pass_is_tried_again() -> None:
    with pytest.raises(OSError, match="the disk is away"):
        engine_config(_Arguments, {"seed": 8})

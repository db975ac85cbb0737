"""Tests how the mesh treats a pooling request that failed in vLLM, and when a step may be long."""

from __future__ import annotations

from pathlib import Path

from pdmesh.engine.vllm.config import CPU_STEP_TOKENS
from pdmesh.engine.vllm.pooling.config import VllmPoolingConfig
from pdmesh.engine.vllm.pooling.engine import _step_limit, failure_of
from pdmesh.errors import EngineFailed, InvalidRequest


class ClientError(Exception):
    """Stands in for vLLM's base class of errors that the client caused."""


class ValidationError(ClientError):
    pass


def test_what_vllm_refuses_is_not_tried_on_every_instance() -> None:
    failed = failure_of(3, ValidationError("too long"), (ClientError, ValueError))
    assert (failed.leg, failed.reason) == (3, InvalidRequest.default_reason)
    assert not failed.is_retryable
    assert "too long" not in failed.message, "it may quote the input"


def test_a_failure_of_the_engine_is_tried_elsewhere() -> None:
    for error in (RuntimeError("x"), EngineFailed("vLLM gave no output")):
        failed = failure_of(3, error, (ClientError, ValueError))
        assert (failed.reason, failed.is_retryable) == (EngineFailed.default_reason, True)


def test_only_a_long_step_on_a_cpu_has_more_time() -> None:
    def patient(device: str, step_tokens: int) -> bool:
        config = VllmPoolingConfig("i", 1, Path("/m"), "m", device=device)
        return _step_limit(config, {"max_num_batched_tokens": step_tokens}) is not None

    assert patient("cpu", 4096)
    assert not patient("cpu", CPU_STEP_TOKENS)
    assert not patient("cuda", 4096)
    assert _step_limit(VllmPoolingConfig("i", 1, Path("/m"), "m", device="cuda"), {}) is None

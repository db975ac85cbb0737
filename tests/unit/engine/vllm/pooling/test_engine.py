"""What a failed request of vLLM means for the mesh."""

from __future__ import annotations

from pdmesh.engine.vllm.pooling.engine import failure_of
from pdmesh.errors import EngineFailed, InvalidRequest


class ClientError(Exception):
    """As vLLM's own base of them."""


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

"""The errors that cross an edge, and what a caller should do about each.

Raise an error where the fact is known. Each edge translates it once (`net.grpc.rpc` for gRPC, the
gateway for HTTP). `reason` is stable and meant for programs. The message is for people and never
holds a prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final

RETRY_AFTER_MS: Final = 1000  # what a retryable error suggests by default
# A message may quote what a caller sent. It is shortened, because gRPC sends it three times in
# a header of at most 8 KiB.
MAX_MESSAGE_BYTES: Final = 1024
MAX_FIELD_BYTES: Final = 256


def shortened(text: str, most: int = 64) -> str:
    """At most `most` bytes of the text, without cutting a character. An ellipsis marks a cut."""
    if 4 * len(text) <= most:
        return text
    data = text[: most + 1].encode(errors="replace")
    return text if len(data) <= most else data[: most - 3].decode(errors="ignore") + "\u2026"


class MeshError(Exception):
    """Base of all expected failures. Codes are those of `grpc.StatusCode` and HTTP."""

    grpc_code: ClassVar[str] = "INTERNAL"
    http_status: ClassVar[int] = 500
    default_reason: ClassVar[str] = "INTERNAL"
    is_retryable: ClassVar[bool] = False  # by calling again, unchanged

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        field: str | None = None,
        retry_after_ms: int | None = None,
    ) -> None:
        self.message = shortened(message, MAX_MESSAGE_BYTES)
        super().__init__(self.message)
        self.reason = reason or self.default_reason
        self.field = None if field is None else shortened(field, MAX_FIELD_BYTES)
        if retry_after_ms is None and self.is_retryable:
            retry_after_ms = RETRY_AFTER_MS
        self.retry_after_ms = retry_after_ms


class InvalidRequest(MeshError):
    """The request is wrong; `field` names the wrong part."""

    grpc_code, http_status, default_reason = "INVALID_ARGUMENT", 400, "INVALID_REQUEST"


class ModelNotFound(MeshError):
    grpc_code, http_status, default_reason = "NOT_FOUND", 404, "MODEL_NOT_FOUND"


class ScenarioNotFound(MeshError):
    """The model is served, but not for this scenario, and never was as far as is known."""

    grpc_code, http_status, default_reason = "NOT_FOUND", 404, "SCENARIO_NOT_FOUND"


class Overloaded(MeshError):
    """No capacity before the deadline; back off for `retry_after_ms`."""

    grpc_code, http_status, default_reason = "RESOURCE_EXHAUSTED", 429, "OVERLOADED"
    is_retryable = True


class NoInstance(MeshError):
    """No live instance could serve it."""

    grpc_code, http_status, default_reason = "UNAVAILABLE", 503, "NO_INSTANCE"
    is_retryable = True


class TokenizerUnavailable(MeshError):
    """The model's tokenizer could not be loaded; it is tried again."""

    grpc_code, http_status, default_reason = "UNAVAILABLE", 503, "TOKENIZER_UNAVAILABLE"
    is_retryable = True


class InstanceLost(MeshError):
    """A leg's instance went away."""

    grpc_code, http_status, default_reason = "UNAVAILABLE", 503, "INSTANCE_LOST"
    is_retryable = True


class KvTransferFailed(MeshError):
    grpc_code, http_status, default_reason = "ABORTED", 503, "KV_TRANSFER_FAILED"
    is_retryable = True


class KvFormatMismatch(MeshError):
    """The KV formats of two instances do not match; another pair may."""

    grpc_code, http_status, default_reason = "FAILED_PRECONDITION", 503, "KV_FORMAT_MISMATCH"
    is_retryable = True


class StalePlan(MeshError):
    grpc_code, http_status, default_reason = "ABORTED", 503, "STALE_PLAN"
    is_retryable = True


class Draining(MeshError):
    grpc_code, http_status, default_reason = "FAILED_PRECONDITION", 503, "DRAINING"
    is_retryable = True


class WrongIncarnation(MeshError):
    """The caller means another incarnation; it should look at the registry again."""

    grpc_code, http_status, default_reason = "FAILED_PRECONDITION", 503, "WRONG_INCARNATION"
    is_retryable = True


class NotLeader(MeshError):
    """This master does not lead now; the caller should ask another one."""

    grpc_code, http_status, default_reason = "FAILED_PRECONDITION", 503, "NOT_LEADER"
    is_retryable = True


class VersionConflict(MeshError):
    """Another writer has changed the value since it was read; read it and decide again."""

    grpc_code, http_status, default_reason = "ABORTED", 409, "VERSION_CONFLICT"


class InvalidToken(MeshError):
    """The caller's bearer token is not valid now; the message says why."""

    grpc_code, http_status, default_reason = "UNAUTHENTICATED", 401, "INVALID_TOKEN"


class NotAllowed(MeshError):
    """The caller may not do this, or has not proved that it may."""

    grpc_code, http_status, default_reason = "PERMISSION_DENIED", 403, "NOT_ALLOWED"


class WrongMeshToken(MeshError):
    """The caller has not shown that it is a process of this mesh."""

    grpc_code, http_status, default_reason = "PERMISSION_DENIED", 403, "WRONG_MESH_TOKEN"


class WrongPeer(MeshError):
    """The caller's certificate does not allow the call, or is for another process."""

    grpc_code, http_status, default_reason = "PERMISSION_DENIED", 403, "WRONG_PEER"


class UntrustedPeer(MeshError):
    """The called process has no certificate that names it and is valid now."""

    grpc_code, http_status, default_reason = "UNAVAILABLE", 503, "UNTRUSTED_PEER"
    is_retryable = True


class BadCertificates(MeshError):
    """The certificate files of this process cannot be used; the message names the file."""

    default_reason = "BAD_CERTIFICATES"


class DeadlineExceeded(MeshError):
    grpc_code, http_status, default_reason = "DEADLINE_EXCEEDED", 504, "DEADLINE_EXCEEDED"


class PoisonRequest(MeshError):
    """Instances died while they worked on the request; it is not tried again."""

    grpc_code, http_status, default_reason = "INTERNAL", 500, "POISON_REQUEST"


class Unavailable(MeshError):
    """A server that this process depends on (NATS, Redis, another service) does not answer."""

    grpc_code, http_status, default_reason = "UNAVAILABLE", 503, "UNAVAILABLE"
    is_retryable = True


class EngineFailed(MeshError):
    """The engine refused or lost a request through no fault of the client's."""

    grpc_code, http_status, default_reason = "UNAVAILABLE", 503, "ENGINE_FAILED"
    is_retryable = True


class EngineMisconfigured(EngineFailed):
    """No engine starts with these settings, this model and this machine: another start would fail
    in the same way.
    """

    default_reason = "ENGINE_MISCONFIGURED"
    is_retryable = False


class ConstraintUnsatisfiable(MeshError):
    """No token satisfies both the form that was asked for and the request's other fields."""

    grpc_code, http_status, default_reason = "INVALID_ARGUMENT", 400, "CONSTRAINT_UNSATISFIABLE"


class ImageUnusable(MeshError):
    """An image cannot be decoded, or does not fit its place in the prompt."""

    grpc_code, http_status, default_reason = "INVALID_ARGUMENT", 400, "IMAGE_UNUSABLE"


class ImageMisfit(MeshError):
    """A prompt has other tokens for an image than this instance's model; another may fit."""

    grpc_code, http_status, default_reason = "FAILED_PRECONDITION", 503, "IMAGE_MISFIT"


class AdapterUnusable(MeshError):
    """A LoRA adapter cannot be loaded: its files, or the model, are not what they should be."""

    grpc_code, http_status, default_reason = "FAILED_PRECONDITION", 503, "ADAPTER_UNUSABLE"


class AdapterMisfit(AdapterUnusable):
    """No instance of the model can load the adapter, so another need not be asked."""


BY_REASON: Final[Mapping[str, type[MeshError]]] = {
    kind.default_reason: kind for kind in MeshError.__subclasses__()
}

"""The errors that a gRPC or HTTP caller may get, and whether the caller should try again.

Code raises these errors, and the edges of the mesh translate them: `net.grpc.rpc` for gRPC, the
gateway for HTTP. An error's `reason` is stable and meant for programs. Its message is for people,
and never contains a prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final

RETRY_AFTER_MS: Final = 1000  # the default `retry_after_ms` of retryable errors
# A message may quote a caller's text, so it may be long. Messages are shortened, because gRPC sends
# each of them three times in a header of at most 8 KiB.
MAX_MESSAGE_BYTES: Final = 1024
MAX_FIELD_BYTES: Final = 256


def shortened(text: str, most: int = 64) -> str:
    """Shorten the text to at most `most` bytes, in whole characters. An ellipsis marks the cut."""
    if 4 * len(text) <= most:
        return text
    data = text[: most + 1].encode(errors="replace")
    return text if len(data) <= most else data[: most - 3].decode(errors="ignore") + "\u2026"


class MeshError(Exception):
    """The base class of all expected failures. `grpc_code` is a name of `grpc.StatusCode`."""

    grpc_code: ClassVar[str] = "INTERNAL"
    http_status: ClassVar[int] = 500
    default_reason: ClassVar[str] = "INTERNAL"
    is_retryable: ClassVar[bool] = False  # whether the same call may succeed later

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
    """The request is wrong. `field` names the wrong part."""

    grpc_code, http_status, default_reason = "INVALID_ARGUMENT", 400, "INVALID_REQUEST"


class ModelNotFound(MeshError):
    grpc_code, http_status, default_reason = "NOT_FOUND", 404, "MODEL_NOT_FOUND"


class ScenarioNotFound(MeshError):
    """The model is served, but not for this scenario, as far as the mesh knows.

    A scenario is a kind of requests with its own groups of instances.
    """

    grpc_code, http_status, default_reason = "NOT_FOUND", 404, "SCENARIO_NOT_FOUND"


class Overloaded(MeshError):
    """There is no capacity now or before the deadline. The caller should wait `retry_after_ms`."""

    grpc_code, http_status, default_reason = "RESOURCE_EXHAUSTED", 429, "OVERLOADED"
    is_retryable = True


class NoInstance(MeshError):
    """No live instance can serve the request."""

    grpc_code, http_status, default_reason = "UNAVAILABLE", 503, "NO_INSTANCE"
    is_retryable = True


class TokenizerUnavailable(MeshError):
    """The gateway has no tokenizer for the model now. A later call may succeed."""

    grpc_code, http_status, default_reason = "UNAVAILABLE", 503, "TOKENIZER_UNAVAILABLE"
    is_retryable = True


class InstanceLost(MeshError):
    """The instance that worked on the request went away."""

    grpc_code, http_status, default_reason = "UNAVAILABLE", 503, "INSTANCE_LOST"
    is_retryable = True


class KvTransferFailed(MeshError):
    grpc_code, http_status, default_reason = "ABORTED", 503, "KV_TRANSFER_FAILED"
    is_retryable = True


class KvFormatMismatch(MeshError):
    """Two instances cannot exchange KV, because its form differs. Another pair may match."""

    grpc_code, http_status, default_reason = "FAILED_PRECONDITION", 503, "KV_FORMAT_MISMATCH"
    is_retryable = True


class StalePlan(MeshError):
    grpc_code, http_status, default_reason = "ABORTED", 503, "STALE_PLAN"
    is_retryable = True


class Draining(MeshError):
    grpc_code, http_status, default_reason = "FAILED_PRECONDITION", 503, "DRAINING"
    is_retryable = True


class WrongIncarnation(MeshError):
    """The call was for another incarnation of the process. The caller should read the registry."""

    grpc_code, http_status, default_reason = "FAILED_PRECONDITION", 503, "WRONG_INCARNATION"
    is_retryable = True


class NotLeader(MeshError):
    """This master does not lead now. The caller should ask another master."""

    grpc_code, http_status, default_reason = "FAILED_PRECONDITION", 503, "NOT_LEADER"
    is_retryable = True


class VersionConflict(MeshError):
    """Another writer has changed the value. The caller should read it again, and then decide."""

    grpc_code, http_status, default_reason = "ABORTED", 409, "VERSION_CONFLICT"


class InvalidToken(MeshError):
    """The caller's bearer token is not valid now. The message names the reason."""

    grpc_code, http_status, default_reason = "UNAUTHENTICATED", 401, "INVALID_TOKEN"


class NotAllowed(MeshError):
    """The caller lacks the permission for the call, or has not proved its identity."""

    grpc_code, http_status, default_reason = "PERMISSION_DENIED", 403, "NOT_ALLOWED"


class WrongMeshToken(MeshError):
    """The call lacks the mesh token, which all processes of a mesh share."""

    grpc_code, http_status, default_reason = "PERMISSION_DENIED", 403, "WRONG_MESH_TOKEN"


class WrongPeer(MeshError):
    """The caller's certificate does not allow the call, or is for another process."""

    grpc_code, http_status, default_reason = "PERMISSION_DENIED", 403, "WRONG_PEER"


class UntrustedPeer(MeshError):
    """The called process did not show a valid certificate with its own name."""

    grpc_code, http_status, default_reason = "UNAVAILABLE", 503, "UNTRUSTED_PEER"
    is_retryable = True


class BadCertificates(MeshError):
    """The certificate files of this process cannot be used. The message names the file."""

    default_reason = "BAD_CERTIFICATES"


class DeadlineExceeded(MeshError):
    grpc_code, http_status, default_reason = "DEADLINE_EXCEEDED", 504, "DEADLINE_EXCEEDED"


class PoisonRequest(MeshError):
    """Instances died while they worked on the request, so the mesh does not try it again."""

    grpc_code, http_status, default_reason = "INTERNAL", 500, "POISON_REQUEST"


class Unavailable(MeshError):
    """A server that this process depends on (NATS, Redis, another service) does not answer."""

    grpc_code, http_status, default_reason = "UNAVAILABLE", 503, "UNAVAILABLE"
    is_retryable = True


class EngineFailed(MeshError):
    """The engine cannot start, died, or refused or lost a request. The client is not the cause."""

    grpc_code, http_status, default_reason = "UNAVAILABLE", 503, "ENGINE_FAILED"
    is_retryable = True


class EngineMisconfigured(EngineFailed):
    """The engine cannot start with these settings and this model on this machine.

    Another start would fail in the same way.
    """

    default_reason = "ENGINE_MISCONFIGURED"
    is_retryable = False


class ConstraintUnsatisfiable(MeshError):
    """No token fits both the requested form of the answer and the request's other fields."""

    grpc_code, http_status, default_reason = "INVALID_ARGUMENT", 400, "CONSTRAINT_UNSATISFIABLE"


class ImageUnusable(MeshError):
    """An image cannot be decoded, or does not have the tokens that the prompt has for it."""

    grpc_code, http_status, default_reason = "INVALID_ARGUMENT", 400, "IMAGE_UNUSABLE"


class ImageMisfit(MeshError):
    """This instance's model needs other tokens for an image than the prompt has.

    The model of another instance may need the same tokens as the prompt has.
    """

    grpc_code, http_status, default_reason = "FAILED_PRECONDITION", 503, "IMAGE_MISFIT"


class AdapterUnusable(MeshError):
    """A LoRA adapter cannot be loaded on this instance, because of its files or the model."""

    grpc_code, http_status, default_reason = "FAILED_PRECONDITION", 503, "ADAPTER_UNUSABLE"


class AdapterMisfit(AdapterUnusable):
    """No instance of the model can load the adapter, so no other instance need be asked."""


BY_REASON: Final[Mapping[str, type[MeshError]]] = {
    kind.default_reason: kind for kind in MeshError.__subclasses__()
}

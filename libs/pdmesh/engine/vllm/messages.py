"""The messages between the host and vLLM's worker processes, beside vLLM's own channels.

The host is the part of an instance outside the engine. vLLM starts its workers as children of the
host's process, and each worker has a KV agent, which stages and pulls KV. Each worker connects to a
unix socket in a private directory. Image embeddings have a socket of their own. When a connection
ends, the worker exits, and the host's engine fails. A frame is a little-endian uint32 length and
one msgpack array with a tag. The docstring of each message begins with the message's sender.

A leg is a request's stay on this instance. A ticket is the right to pull one prompt's KV from the
staging range, into which a prefill copies it. The landing range is the memory that a decode's pull
writes to.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable

import msgspec
import structlog

log = structlog.get_logger(__name__)

MAX_FRAME = 1 << 16
_LENGTH = struct.Struct("<I")


class RankMessage(msgspec.Struct, array_like=True, tag=True):
    """Base of all messages. A subclass's name is the tag in its frames."""


class RankHello(RankMessage):
    """Worker: the KV agent of `rank` listens. Sent once, after the KV cache has been allocated."""

    rank: int
    num_ranks: int
    pid: int
    address: str
    model_fingerprint: str
    num_blocks: int
    block_bytes: int  # bytes of one block in all layers of this rank
    num_layers: int
    windows: tuple[int, ...] = ()  # each layer's window in tokens; 0: none; (): no layer has one
    num_groups: int = 1  # cache groups (sets of layers), which share the blocks
    named_group: int = 0  # the group whose blocks show which prefixes are cached
    kv_path: str = ""  # where the arenas are, and why: "host: the engine computes on a CPU"


class RankTicketOpened(RankMessage):
    """Worker: the KV of a per-layer prefill may be pulled, each layer once it is computed."""

    rank: int
    ticket_id: str


class Staged(RankMessage):
    """Worker: the prompt's KV is in the staging range and may be pulled."""

    rank: int
    ticket_id: str


class StageFailed(RankMessage):
    """Worker: nothing is staged under the ticket, and nothing will be."""

    rank: int
    ticket_id: str
    message: str


class RankTicketClosed(RankMessage):
    """Worker: nothing reads or writes the ticket's staging range any more."""

    rank: int
    ticket_id: str
    reason: str


class Pulling(RankMessage):
    """Worker: the leg begins to pull its KV. Not sent if all blocks are cached."""

    rank: int
    leg: int


class Arrived(RankMessage):
    """Worker: the pulled KV is in the leg's blocks. The leg waits for a place in a step.

    Arrived comes before Received, even in the same step.
    """

    rank: int
    leg: int


class Received(RankMessage):
    """Worker: the pulled KV is in the leg's blocks, and the leg is in the step about to run."""

    rank: int
    leg: int
    kv_bytes: int
    duration_s: float
    num_computed_tokens: int
    waited_s: float  # as in `KvReceived`


class PullFailed(RankMessage):
    """Worker: the leg's KV did not arrive. vLLM fails the request with the next step."""

    rank: int
    leg: int
    reason: str
    message: str
    cause: str = ""  # the KV agent's reason


class RankLandingFreed(RankMessage):
    """Worker: no late write can reach the leg's landing range any more."""

    rank: int
    leg: int


class Release(RankMessage):
    """Host: no peer will pull this ticket's KV."""

    ticket_id: str


class FetchToPool(RankMessage):
    """Host: bring blocks of a prompt from the tiers into the pool.

    Answered by Fetched. Blocks that are there in time stay in the pool until the leg has loaded
    them (a lease).
    """

    leg: int
    names: list[bytes]
    owner: bytes
    first: int  # blocks before this one are in the engine
    timeout_s: float
    asks_peers: bool = False  # if set, Holders follows


class Holders(RankMessage):
    """Host: which peers hold blocks of the leg's prompt.

    Each holding is (instance, incarnation, addresses, first, count).
    """

    leg: int
    holdings: list[tuple[str, int, tuple[str, ...], int, int]]


class ForgetLease(RankMessage):
    """Host: the leg will load no blocks from the pool. Fetched need not follow."""

    leg: int


class Pin(RankMessage):
    """Host: evict no block of these prefixes. They replace the prefixes of the last Pin.

    Each prefix is (owner, until in unix seconds, names).
    """

    prefixes: list[tuple[bytes, float, list[bytes]]]


class PrefetchToPool(RankMessage):
    """Host: bring a peer's blocks into the pool if that saves time (`TierStack.prefetch`)."""

    names: list[bytes]
    owner: bytes
    holder: tuple[str, int, tuple[str, ...], int, int]  # as in Holders
    chance: float


class SessionNote(RankMessage):
    """Host: a chat session has paused, goes on or is done, as its client said in a request.

    The worker passes the fields to `TierStack.note_session`.
    """

    session: str
    state: str
    names: list[bytes]
    owner: bytes
    hold_s: float


# The host's orders to a worker's tiers.
TierOrder = FetchToPool | Holders | ForgetLease | Pin | PrefetchToPool | SessionNote


class Fetched(RankMessage):
    """Worker: blocks `first` to `end - 1` of the prompt stay in the pool for the leg."""

    rank: int
    leg: int
    first: int
    end: int


class TierNews(RankMessage):
    """Worker: changes in its tiers, which keep KV outside vLLM, since the last report.

    See `kv.tiers.report`.
    """

    rank: int
    counts: list[tuple[str, str, int]]  # tier, event, blocks
    seconds: dict[str, float]
    bytes_used: dict[str, int]
    stored: list[bytes]
    removed: list[bytes]
    faults: list[tuple[str, str, str, tuple[str, int] | None]]  # the fields of `TierFault`
    num_pinned: int | None = None
    num_leased: int | None = None


class Open(RankMessage):
    """Host: open the ticket of a per-layer prefill, which is about to run.

    Answered by RankTicketOpened.
    """

    ticket_id: str
    attempt: int
    offset: int  # of the staging range
    length: int
    num_tokens: int
    lease_s: float


class Join(RankMessage):
    """Host: token 1 of a decode that began before the token was known."""

    leg: int
    token_id: int


class ProbePeer(RankMessage):
    """Host: pull a probe from the ranks of the peer that KV would come from.

    Answered by Probed.
    """

    check_id: int
    instance_id: str
    incarnation: int
    addresses: tuple[str, ...]
    timeout_s: float


class Probed(RankMessage):
    """Worker: the result of a probe. `reason` is empty if every rank's answer was correct."""

    rank: int
    check_id: int
    reason: str
    message: str


class Connections(RankMessage):
    """Worker: how many KV connections are open now, whichever side opened them."""

    rank: int
    num_open: int


class Working(RankMessage):
    """Worker: it computes, or loads an adapter.

    Sent when a step begins, within the step, and while an adapter is loaded, at most a few times a
    second.
    """

    rank: int
    num_signs: int  # steps, layers, and layers of loaded adapters, since the start
    num_tokens: int  # tokens of the steps begun, since the start


class FetchEmbeddings(RankMessage):
    """Host: fetch the embeddings of a prompt's images from an encoder.

    Answered by EmbeddingsFetched.
    """

    leg: int
    instance_id: str
    incarnation: int
    address: str
    identifiers: list[str]  # of the images; those with equal numbers of tokens stand together
    num_tokens: list[int]  # of each image
    deadline_s: float


class ForgetEmbeddings(RankMessage):
    """Host: no request will use the leg's embeddings. EmbeddingsFetched need not follow."""

    leg: int


class EmbeddingsFetched(RankMessage):
    """Worker: the embeddings of the prompt's first `num_images` images have arrived."""

    rank: int
    leg: int
    num_images: int
    failure: str = ""  # the KV agent's reason, if the fetch failed


class EmbeddingsHeld(RankMessage):
    """Worker: which embeddings its pool has stored or lost since the last report.

    `removed` has the names of embeddings that the pool evicted or did not take.
    """

    rank: int
    stored: list[bytes]
    removed: list[bytes]


class Disconnect(RankMessage):
    """Host: the peer with these addresses has left."""

    addresses: tuple[str, ...]


ToHost = (
    RankHello
    | RankTicketOpened
    | Staged
    | StageFailed
    | RankTicketClosed
    | Pulling
    | Arrived
    | Received
    | PullFailed
    | RankLandingFreed
    | Fetched
    | TierNews
    | Probed
    | Connections
    | Working
    | EmbeddingsFetched
    | EmbeddingsHeld
)
ToWorker = (
    Release | Open | Join | TierOrder | ProbePeer | Disconnect | FetchEmbeddings | ForgetEmbeddings
)

_encoder = msgspec.msgpack.Encoder()
_to_host = msgspec.msgpack.Decoder(ToHost)
_to_worker = msgspec.msgpack.Decoder(ToWorker)


def encode_frame(message: RankMessage) -> bytes:
    data = _encoder.encode(message)
    assert len(data) <= MAX_FRAME, "a control message is small"
    return _LENGTH.pack(len(data)) + data


class FrameBuffer:
    """Cuts a byte stream into frames. Raises ValueError on a frame longer than MAX_FRAME."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        self._data += data
        frames: list[bytes] = []
        while len(self._data) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._data)
            if length > MAX_FRAME:
                raise ValueError(f"a control frame of {length} bytes is too long")
            end = _LENGTH.size + length
            if len(self._data) < end:
                break
            frames.append(bytes(self._data[_LENGTH.size : end]))
            del self._data[:end]
        return frames


def decode_to_host(frame: bytes) -> ToHost:
    """Raises msgspec.ValidationError or DecodeError on anything but a known message."""
    message: ToHost = _to_host.decode(frame)
    return message


class WorkerControl:
    """The worker's end of the connection.

    Messages are sent from any thread and received on a separate thread.
    """

    def __init__(
        self, path: str, on_message: Callable[[ToWorker], None], on_closed: Callable[[], None]
    ) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)
        self._on_message, self._on_closed = on_message, on_closed
        self._lock = threading.Lock()
        self._is_closing = False
        threading.Thread(target=self._receive, name="pdmesh-control", daemon=True).start()

    def send(self, message: RankMessage) -> None:
        """Blocks while the host does not read, so that messages to a frozen host fill no memory."""
        try:
            with self._lock:
                self._socket.sendall(encode_frame(message))
        except OSError:
            pass  # the receiving thread notices the lost connection and acts on it

    def close(self) -> None:
        self._is_closing = True
        with contextlib.suppress(OSError):  # the socket is already gone
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _receive(self) -> None:
        frames = FrameBuffer()
        try:
            while data := self._socket.recv(65536):
                for frame in frames.feed(data):
                    self._on_message(_to_worker.decode(frame))
        except OSError:
            pass
        except Exception:
            log.exception("vllm.control.died")
        if not self._is_closing:
            self._on_closed()  # in each case, the host's messages no longer arrive

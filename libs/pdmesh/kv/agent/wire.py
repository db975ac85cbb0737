"""The messages between two KV agents: fixed little-endian headers, checked lengths, no pickle.

A receiver asks a sender for KV with PULL (a ticket's KV), FETCH (blocks by name) or PROBE. The
sender announces each part of the answer with a META message, as contiguous ranges of bytes and
never as blocks (S49). A small part travels inside its META. The receiver writes a pull's parts to
one range of its memory (the landing range), and ends the pull with ACK.

Each message carries a seal. The seal is a checksum of the message without the inline payload; the
checksums of the payload are in META. Without the seal, a changed bit in a ticket id, a pull id or a
flag could request, answer, end or renew another request's transfer. The seal has no key: it
protects against faults, not against forgers. The transport's handshake and unguessable ticket ids
keep forgers out.

Messages and core events are not `frozen`. A small pull makes 25 of them, and freezing them would
make the pull 10 % more expensive.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum

import xxhash

from pdmesh.core.kv.transfer.pull_parts import INLINE_BYTES, MAX_SPANS
from pdmesh.core.kv.transfer.ticket import MAX_TICKET_ID, Refusal
from pdmesh.errors import KvTransferFailed
from pdmesh.kv.agent.checksums import ChecksumKind

MAGIC = b"PDKV"
VERSION = 6

_CHECKSUM_KINDS = frozenset(ChecksumKind)
MAX_INLINE = INLINE_BYTES  # the largest payload that META may carry
MAX_RANGES = MAX_SPANS
MAX_NAMES = 1024
NAME_BYTES = 16
MAX_PULL_BYTES = 1 << 44
CHECKSUM_BYTES = 16

# magic, version, kind of message, detail (the ChecksumKind in META, otherwise 0), bytes of the
# message, pull id
_HEAD = struct.Struct("<4sBBHIQ")
_SEAL = struct.Struct("<Q")  # after the head: xxh3_64 of the head and the body
BODY_AT = _HEAD.size + _SEAL.size
_KIND_AT = 5
# attempt, incarnation, fingerprint, first block, first head, heads, takers, decode, group, bytes of
# the ticket id
_PULL = struct.Struct("<IQQIIIBQQH")
_FETCH = struct.Struct("<QQH")  # incarnation, fingerprint, number of names
_PROBE = struct.Struct(f"<QQ{NAME_BYTES}s")  # incarnation, fingerprint, nonce
_RENEW = struct.Struct("<IQH")  # attempt, incarnation, bytes of the ticket id
_META = struct.Struct("<QQHB")  # question, bytes of the whole pull, number of ranges, is inline
_RANGE = struct.Struct(f"<QQ{CHECKSUM_BYTES}s")  # offset in the landing range, bytes, checksum
_BYTE = struct.Struct("<B")


class WireError(KvTransferFailed):
    """Bytes from a peer that are not a message."""

    default_reason = "KV_PROTOCOL_ERROR"


class Kind(IntEnum):
    PULL = 1
    META = 2
    REFUSED = 3
    ACK = 4
    RENEW = 5
    FETCH = 6
    PROBE = 7


@dataclass(slots=True)
class Pull:
    """Receiver to sender: send this ticket's blocks from `first_block` on.

    `num_heads` is the number of requested heads, and 0 means all. The decode has `num_takers` ranks
    that pull the ticket from this sender.
    """

    pull_id: int
    ticket_id: str = field(repr=False)
    attempt: int
    incarnation: int
    fingerprint_hash: int
    first_block: int = 0
    first_head: int = 0
    num_heads: int = 0
    num_takers: int = 1
    decode: int = 0  # `checksums.decode_hash`, the same for all takers
    group_hash: int = 0  # the receiver's group: the sender refuses other groups


@dataclass(slots=True)
class Fetch:
    """Receiver to sender: send the named blocks, up to the first one that your pool lacks."""

    pull_id: int
    incarnation: int
    fingerprint_hash: int
    names: tuple[bytes, ...]


@dataclass(slots=True)
class Probe:
    """Receiver to sender: send `probes.probe_bytes` of this nonce, as you would send KV (S16)."""

    pull_id: int
    incarnation: int
    fingerprint_hash: int
    nonce: bytes


@dataclass(slots=True)
class Range:
    """Contiguous bytes, and their offset in the receiver's landing range."""

    offset: int
    length: int
    checksum: bytes  # of the kind that META names


@dataclass(slots=True)
class Meta:
    """Sender to receiver: this part of a pull is coming.

    Either `inline` has the bytes of all ranges, or one payload per range follows this message. The
    ranges of a part are consecutive, and the parts of a pull are consecutive. `question` lets the
    receiver reject a valid answer to another pull.
    """

    pull_id: int
    num_bytes: int  # of all parts of the pull together
    ranges: tuple[Range, ...]
    inline: memoryview | None = None
    question: int = 0  # `question()` of the message that asked for the pull
    checksums: ChecksumKind = ChecksumKind.XXH3  # the kind of the ranges' checksums

    @property
    def offset(self) -> int:
        return self.ranges[0].offset if self.ranges else 0

    @property
    def length(self) -> int:
        return sum(r.length for r in self.ranges)


@dataclass(slots=True)
class PullRefusal:
    """Sender to receiver: no part of this pull follows."""

    pull_id: int
    refusal: Refusal


@dataclass(slots=True)
class Ack:
    """Receiver to sender: the pull is over.

    If `is_taken`, the receiver has verified the bytes, and the sender may close the ticket. If not,
    the sender must announce no more parts of this pull.
    """

    pull_id: int
    is_taken: bool


@dataclass(slots=True)
class Renew:
    """Receiver to sender: keep the ticket for another lease. Its pull waits or is under way.

    The sender does not answer.
    """

    ticket_id: str = field(repr=False)
    attempt: int
    incarnation: int


Message = Pull | Meta | PullRefusal | Ack | Renew | Fetch | Probe
Question = Pull | Fetch | Probe


def question(message: Question) -> int:
    """A checksum of the message's fields. Both ends compute it, each from its own copy."""
    return xxhash.xxh3_64_intdigest(_plain(message))


def encode(message: Message) -> list[bytes | memoryview]:
    """The message as buffers, to be sent one after the other."""
    plain = _plain(message)
    seal = _SEAL.pack(xxhash.xxh3_64_intdigest(plain))
    sealed = plain[: _HEAD.size] + seal + plain[_HEAD.size :]
    if isinstance(message, Meta) and message.inline is not None:
        return [sealed, message.inline]
    return [sealed]


def _plain(message: Message) -> bytes:
    """Head and body, without the seal and without inline bytes."""
    match message:
        case Meta(pull_id, num_bytes, ranges, inline, question, checksums):
            is_inline = inline is not None
            body = _META.pack(question, num_bytes, len(ranges), is_inline) + b"".join(
                _RANGE.pack(r.offset, r.length, r.checksum) for r in ranges
            )
            size = len(inline) if inline is not None else 0
            return _head(Kind.META, pull_id, len(body) + size, checksums) + body
        case Pull():
            name = _name(message.ticket_id)
            body = _PULL.pack(
                message.attempt,
                message.incarnation,
                message.fingerprint_hash,
                message.first_block,
                message.first_head,
                message.num_heads,
                message.num_takers,
                message.decode,
                message.group_hash,
                len(name),
            )
            return _head(Kind.PULL, message.pull_id, len(body) + len(name)) + body + name
        case Ack(pull_id, is_taken):
            return _head(Kind.ACK, pull_id, 1) + _BYTE.pack(is_taken)
        case PullRefusal(pull_id, refusal):
            return _head(Kind.REFUSED, pull_id, 1) + _BYTE.pack(refusal)
        case Renew(ticket_id, attempt, incarnation):
            name = _name(ticket_id)
            body = _RENEW.pack(attempt, incarnation, len(name)) + name
            return _head(Kind.RENEW, 0, len(body)) + body
        case Fetch(pull_id, incarnation, fingerprint, names):
            body = _FETCH.pack(incarnation, fingerprint, len(names)) + b"".join(names)
            return _head(Kind.FETCH, pull_id, len(body)) + body
        case Probe(pull_id, incarnation, fingerprint, nonce):
            body = _PROBE.pack(incarnation, fingerprint, nonce)
            return _head(Kind.PROBE, pull_id, len(body)) + body


def parse(data: memoryview) -> Message:
    """Parse one whole message from any bytes. Raises WireError and nothing else.

    `Meta.inline` is a view of `data`.
    """
    if len(data) < BODY_AT:
        raise WireError(f"a message of {len(data)} bytes is too short")
    magic, version, kind, detail, size, pull_id = _HEAD.unpack_from(data)
    if magic != MAGIC or version != VERSION:
        raise WireError("not a KV message of this version")
    if size != len(data):
        raise WireError(f"a message of {len(data)} bytes says it has {size}")
    reader = _READERS.get(kind)
    if reader is None:
        raise WireError(f"unknown kind {kind}")
    if detail and (kind != Kind.META or detail not in _CHECKSUM_KINDS):
        raise WireError(f"unknown detail {detail} of a message of kind {kind}")
    if seal_of(data) != _SEAL.unpack_from(data, _HEAD.size)[0]:
        raise WireError("a message that does not match its seal")
    message = reader(pull_id, data[BODY_AT:])
    if isinstance(message, Meta):
        message.checksums = ChecksumKind(detail)
    return message


def seal_of(data: memoryview) -> int:
    """The correct seal of a message of at least BODY_AT bytes."""
    body = data[BODY_AT:]
    if data[_KIND_AT] == Kind.META and len(body) >= _META.size:
        num_ranges: int = _META.unpack_from(body)[2]  # checked by the seal
        body = body[: _META.size + num_ranges * _RANGE.size]
    return xxhash.xxh3_64_intdigest(bytes(data[: _HEAD.size]) + body)


def _head(kind: Kind, pull_id: int, body_bytes: int, detail: int = 0) -> bytes:
    return _HEAD.pack(MAGIC, VERSION, kind, detail, BODY_AT + body_bytes, pull_id)


def _name(ticket_id: str) -> bytes:
    name = ticket_id.encode()
    if not 0 < len(name) <= MAX_TICKET_ID:
        raise WireError(f"a ticket id must have 1 to {MAX_TICKET_ID} bytes, not {len(name)}")
    return name


def _read_name(data: memoryview, offset: int, size: int) -> str:
    if not 0 < size <= MAX_TICKET_ID or len(data) != offset + size:
        raise WireError(f"a ticket id of {size} bytes in a body of {len(data)}")
    try:
        return str(data[offset:], "utf-8")
    except UnicodeDecodeError as exc:
        raise WireError("a ticket id that is not text") from exc


def _need(data: memoryview, size: int) -> None:
    if len(data) < size:
        raise WireError(f"a body of {len(data)} bytes, at least {size} needed")


def _parse_pull(pull_id: int, data: memoryview) -> Pull:
    _need(data, _PULL.size)
    fields = _PULL.unpack_from(data)
    attempt, incarnation, fingerprint, first_block, first_head, num_heads = fields[:6]
    num_takers, decode, group, size = fields[6:]
    if not num_takers:
        raise WireError("a pull without takers")
    return Pull(
        pull_id,
        _read_name(data, _PULL.size, size),
        attempt,
        incarnation,
        fingerprint,
        first_block,
        first_head,
        num_heads,
        num_takers,
        decode,
        group,
    )


def _parse_fetch(pull_id: int, data: memoryview) -> Fetch:
    _need(data, _FETCH.size)
    incarnation, fingerprint, num_names = _FETCH.unpack_from(data)
    if not 0 < num_names <= MAX_NAMES or len(data) != _FETCH.size + num_names * NAME_BYTES:
        raise WireError(f"{num_names} names in a body of {len(data)} bytes")
    starts = range(_FETCH.size, len(data), NAME_BYTES)
    names = tuple(bytes(data[at : at + NAME_BYTES]) for at in starts)
    return Fetch(pull_id, incarnation, fingerprint, names)


def _parse_probe(pull_id: int, data: memoryview) -> Probe:
    if len(data) != _PROBE.size:
        raise WireError(f"a probe of {len(data)} bytes")
    return Probe(pull_id, *_PROBE.unpack(data))


def _parse_renew(pull_id: int, data: memoryview) -> Renew:
    _need(data, _RENEW.size)
    if pull_id:
        raise WireError("a renewal names a ticket, not a pull")
    attempt, incarnation, name_size = _RENEW.unpack_from(data)
    return Renew(_read_name(data, _RENEW.size, name_size), attempt, incarnation)


def _parse_meta(pull_id: int, data: memoryview) -> Meta:
    _need(data, _META.size)
    question, num_bytes, num_ranges, is_inline = _META.unpack_from(data)
    if num_ranges > MAX_RANGES or num_bytes > MAX_PULL_BYTES or is_inline > 1:
        raise WireError(f"{num_bytes} bytes in {num_ranges} ranges")
    end = _META.size + num_ranges * _RANGE.size
    _need(data, end)
    ranges = tuple(
        Range(*_RANGE.unpack_from(data, _META.size + i * _RANGE.size)) for i in range(num_ranges)
    )
    length = _tiled_bytes(ranges, num_bytes)
    if len(data) - end != (length if is_inline else 0):
        raise WireError(f"{len(data) - end} bytes behind the ranges")
    return Meta(pull_id, num_bytes, ranges, data[end:] if is_inline else None, question)


def _tiled_bytes(ranges: tuple[Range, ...], num_bytes: int) -> int:
    """The total length of the ranges. Raises WireError unless they are consecutive in the pull.

    Consecutive ranges write no byte twice and none outside the landing range.
    """
    start = end = ranges[0].offset if ranges else 0
    for r in ranges:
        if r.offset != end or r.length == 0:
            raise WireError("ranges with a gap or an overlap")
        end += r.length
    if end > num_bytes or (not ranges and num_bytes):
        raise WireError(f"ranges up to {end} of {num_bytes} bytes")
    return end - start


def _parse_refused(pull_id: int, data: memoryview) -> PullRefusal:
    if len(data) != 1:
        raise WireError("a refusal must have one byte")
    try:
        return PullRefusal(pull_id, Refusal(data[0]))
    except ValueError as exc:
        raise WireError(f"unknown refusal {data[0]}") from exc


def _parse_ack(pull_id: int, data: memoryview) -> Ack:
    if len(data) != 1 or data[0] > 1:
        raise WireError("an ack must have one byte, 0 or 1")
    return Ack(pull_id, data[0] == 1)


_READERS: dict[int, Callable[[int, memoryview], Message]] = {
    Kind.PULL: _parse_pull,
    Kind.META: _parse_meta,
    Kind.REFUSED: _parse_refused,
    Kind.ACK: _parse_ack,
    Kind.RENEW: _parse_renew,
    Kind.FETCH: _parse_fetch,
    Kind.PROBE: _parse_probe,
}

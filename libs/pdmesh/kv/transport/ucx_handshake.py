"""How two UCX transports connect without a listener: addresses, and the two opening messages.

An address has all that is needed to reach a process: the UCX address of its worker, the process's
handshake key, and the life of the transport. It travels over the mesh's control channel. A peer
that connects sends a hello to connection number 0; the answer, a welcome, goes to the number that
the hello names. Both carry a keyed digest, so that no stranger's message and no damaged byte
reaches UCX's parser of addresses. A stranger gets no answer. A welcome for a connection that was
given up meanwhile is answered with a goodbye.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import struct
from dataclasses import dataclass, field

HANDSHAKE = 0  # the connection number that hellos are sent to; no connection has it
KEY_BYTES = 16
MAX_WORKER_ADDRESS = 8 << 10
_SCHEME = "ucx:"
_MAGIC = b"PDKVUCX5"
_DIGEST_BYTES = 16
# magic, the wanted transport's life, the connecting side's number and turn
_HELLO = struct.Struct("<8sQQI")
# magic, the connecting side's number, the accepting side's number and turn
_WELCOME = struct.Struct("<8sQQI")


@dataclass(frozen=True, slots=True)
class Address:
    worker: bytes
    key: bytes = field(repr=False)
    life: int

    def __str__(self) -> str:
        worker = base64.urlsafe_b64encode(_sealed(self.worker, self.key)).decode()
        return f"{_SCHEME}{worker}.{self.key.hex()}/{self.life:x}"


def parse_address(text: str) -> Address:
    """Raises ValueError if it is no address of ours."""
    before, _, life = text.removeprefix(_SCHEME).partition("/")
    worker, _, key = before.partition(".")
    if not text.startswith(_SCHEME) or len(key) != 2 * KEY_BYTES:
        raise ValueError("not a UCX address of a KV agent")
    secret = bytes.fromhex(key)
    decoded = _opened(base64.b64decode(worker, altchars=b"-_", validate=True), secret)
    if not decoded or len(decoded) > MAX_WORKER_ADDRESS:
        raise ValueError("a damaged UCX address of a KV agent")
    return Address(decoded, secret, int(life, 16))


def make_key() -> bytes:
    return secrets.token_bytes(KEY_BYTES)


@dataclass(frozen=True, slots=True)
class Hello:
    """I want to connect to this life of yours; answer to this number at this worker's address.

    `turn`: of the endpoint that this hello comes on (`ucx_endpoints`).
    """

    life: int
    number: int
    turn: int
    worker: bytes


@dataclass(frozen=True, slots=True)
class Welcome:
    """The accepting side's number of the connection, and the turn of its endpoint."""

    number: int
    turn: int


def pack_hello(hello: Hello, key: bytes) -> bytes:
    head = _HELLO.pack(_MAGIC, hello.life, hello.number, hello.turn)
    return _sealed(head + hello.worker, key)


def read_hello(data: bytes, key: bytes) -> Hello | None:
    """None if it is from a stranger, or damaged."""
    body = _opened(data, key)
    if body is None or not 0 < len(body) - _HELLO.size <= MAX_WORKER_ADDRESS:
        return None
    magic, life, number, turn = _HELLO.unpack_from(body)
    return Hello(life, number, turn, body[_HELLO.size :]) if magic == _MAGIC and number else None


def pack_welcome(number: int, own: Welcome, key: bytes) -> bytes:
    return _sealed(_WELCOME.pack(_MAGIC, number, own.number, own.turn), key)


def read_welcome(data: bytes, number: int, key: bytes) -> Welcome | None:
    """None if this does not answer the hello of `number`."""
    body = _opened(data, key)
    if body is None or len(body) != _WELCOME.size:
        return None
    magic, asked, theirs, turn = _WELCOME.unpack(body)
    return Welcome(theirs, turn) if magic == _MAGIC and asked == number and theirs else None


def _sealed(body: bytes, key: bytes) -> bytes:
    return body + _digest(body, key)


def _opened(data: bytes, key: bytes) -> bytes | None:
    body, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    return body if hmac.compare_digest(digest, _digest(body, key)) else None


def _digest(body: bytes, key: bytes) -> bytes:
    return hashlib.blake2b(body, key=key, digest_size=_DIGEST_BYTES).digest()

"""The addresses and the opening messages by which two UCX transports connect without a listener.

The address of a transport has three parts: the UCX address of the worker, the handshake key, and a
random number that identifies the transport (its life). Peers get the address over the mesh's
control channel. A peer connects by sending a hello to connection number 0. The hello contains a
connection number, and the answer (a welcome) is sent to that number. Hello and welcome carry a
keyed digest, so that no stranger's message and no damaged byte reaches UCX's parser of addresses. A
stranger gets no answer.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import struct
from dataclasses import dataclass, field

HANDSHAKE = 0  # hellos are sent to this number, which no connection has
KEY_BYTES = 16
MAX_WORKER_ADDRESS = 8 << 10
_SCHEME = "ucx:"
_MAGIC = b"PDKVUCX5"
_DIGEST_BYTES = 16
# magic, life of the transport to connect to, number and turn of the connecting side
_HELLO = struct.Struct("<8sQQI")
# magic, number of the connecting side, number and turn of the accepting side
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
    """Raises ValueError if `text` is not the address of a UCX transport."""
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
    """The connecting side's first message.

    It asks for a connection to the transport with this `life`. The answer must be sent to
    connection `number` at the `worker` address. `turn` is the turn of the endpoint that carries the
    hello (`ucx_endpoints`).
    """

    life: int
    number: int
    turn: int
    worker: bytes


@dataclass(frozen=True, slots=True)
class Welcome:
    """The answer to a hello: the accepting side's connection number, and its endpoint's turn."""

    number: int
    turn: int


def pack_hello(hello: Hello, key: bytes) -> bytes:
    head = _HELLO.pack(_MAGIC, hello.life, hello.number, hello.turn)
    return _sealed(head + hello.worker, key)


def read_hello(data: bytes, key: bytes) -> Hello | None:
    """Parse a hello. Returns None if it is damaged, or if it was made without the key."""
    body = _opened(data, key)
    if body is None or not 0 < len(body) - _HELLO.size <= MAX_WORKER_ADDRESS:
        return None
    magic, life, number, turn = _HELLO.unpack_from(body)
    return Hello(life, number, turn, body[_HELLO.size :]) if magic == _MAGIC and number else None


def pack_welcome(number: int, own: Welcome, key: bytes) -> bytes:
    return _sealed(_WELCOME.pack(_MAGIC, number, own.number, own.turn), key)


def read_welcome(data: bytes, number: int, key: bytes) -> Welcome | None:
    """Parse a welcome. Returns None if it is not an intact answer to the hello of `number`."""
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

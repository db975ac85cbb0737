"""HTTP/2 frames built by hand, for input that no client library would send."""

from __future__ import annotations

import asyncio
import struct
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 8, 9
_END_STREAM, END_HEADERS = 0x1, 0x4
_INITIAL_WINDOW: Final = 4


def frame(kind: int, payload: bytes = b"", *, flags: int = 0, stream: int = 0) -> bytes:
    head = struct.pack(">I", len(payload))[1:] + bytes([kind, flags])
    return head + struct.pack(">I", stream) + payload


def window_update(stream: int, num_bytes: int) -> bytes:
    return frame(WINDOW_UPDATE, struct.pack(">I", num_bytes), stream=stream)


# The beginning of a client's connection. The server may send up to 1 GiB on the connection.
HELLO: Final = PREFACE + frame(SETTINGS) + window_update(0, 1 << 30)


def header(name: bytes, value: bytes) -> bytes:
    """A literal header without indexing and without Huffman coding."""
    return b"\x00" + _string(name) + _string(value)


def _string(text: bytes) -> bytes:
    if len(text) < 127:
        return bytes([len(text)]) + text
    rest, size = len(text) - 127, b"\x7f"
    while rest >= 128:
        size += bytes([rest % 128 + 128])
        rest //= 128
    return size + bytes([rest]) + text


def call(stream: int, path: bytes, *more: bytes, flags: int = END_HEADERS) -> bytes:
    """The HEADERS frame of a gRPC call. A client's stream numbers are odd."""
    head = b"".join(
        (
            header(b":method", b"POST"), header(b":scheme", b"http"), header(b":path", path),
            header(b":authority", b"x"), header(b"content-type", b"application/grpc"),
            header(b"te", b"trailers"), *more,
        )
    )  # fmt: skip
    return frame(HEADERS, head, flags=flags, stream=stream)


def half_message(num_bytes: int) -> bytes:
    """The 5 bytes that precede a gRPC message of this size, without the message."""
    return b"\x00" + struct.pack(">I", num_bytes)


class Halves:
    """Sends calls with incomplete messages on one connection, as fast as flow control allows."""

    def __init__(self, path: bytes, num_calls: int, num_bytes: int) -> None:
        self.num_sent = 0
        self.is_ended = False  # whether the server closed the connection
        self.ended: set[int] = set()  # the streams that the server closed
        self.streams = [2 * i + 1 for i in range(num_calls)]
        self._path, self._num_bytes = path, num_bytes
        self._left = dict.fromkeys(self.streams, num_bytes)
        self._windows = dict.fromkeys((0, *self.streams), 65535)
        self._begun: set[int] = set()
        self._buffer = b""
        self._initial = 65535

    async def run(self, port: int, source: str) -> None:
        """Run until the server has closed all streams or the connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(source, 0))
        writer.write(HELLO + b"".join(call(s, self._path) for s in self.streams))
        try:
            while len(self.ended) < len(self.streams):
                self._send(writer)
                data = await reader.read(1 << 20)
                if not data:
                    self.is_ended = True
                    return
                self._buffer += data
                while (taken := self._take(writer)) is not None:
                    self._buffer = self._buffer[taken:]
        except ConnectionError:
            self.is_ended = True
        finally:
            writer.transport.abort()

    def _send(self, writer: asyncio.StreamWriter) -> None:
        for stream, left in self._left.items():
            while left > 0 and stream not in self.ended:
                room = min(self._windows[0], self._windows[stream], 16384)
                if room < 6:
                    break
                payload = b"a" * min(room - 5, left)
                if stream not in self._begun:
                    self._begun.add(stream)
                    payload = half_message(self._num_bytes + 1) + payload
                writer.write(frame(DATA, payload, stream=stream))
                left -= len(payload)
                self.num_sent += len(payload)
                self._windows[0] -= len(payload)
                self._windows[stream] -= len(payload)
            self._left[stream] = left

    def _take(self, writer: asyncio.StreamWriter) -> int | None:
        """Handle one frame of the server, and return its size; None if the frame is incomplete."""
        size = 9 + int.from_bytes(self._buffer[:3], "big")
        if len(self._buffer) < max(9, size):
            return None
        kind, flags = self._buffer[3], self._buffer[4]
        stream = int.from_bytes(self._buffer[5:9], "big") & 0x7FFFFFFF
        payload = self._buffer[9:size]
        if kind == WINDOW_UPDATE:
            self._windows[stream] = self._windows.get(stream, 0) + int.from_bytes(payload, "big")
        elif kind == SETTINGS and not flags:
            writer.write(frame(SETTINGS, flags=1))
            self._heed(payload)
        elif kind == PING and not flags:
            writer.write(frame(PING, payload, flags=1))
        elif kind == RST_STREAM or (kind == HEADERS and flags & _END_STREAM):
            self.ended.add(stream)
        return size

    def _heed(self, settings: bytes) -> None:
        for number, value in struct.iter_unpack(">HI", settings):
            if number == _INITIAL_WINDOW:
                grown = value - self._initial
                self._initial = value
                for stream in self.streams:
                    self._windows[stream] += grown

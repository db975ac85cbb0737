"""A UCX worker that moves KV bytes, driven by an asyncio event loop.

ucxx's own asyncio front end polls for each request, so it is not used. Here the loop watches the
worker's event fd. When the fd is readable, the worker progresses, the callbacks of completed
requests run, and the worker is armed again. An idle worker costs nothing, and no message costs an
await.

There is no listener (ADR 0002). Peers get the worker's address from the mesh. A worker is never
destroyed (ADR 0024). One transport after another uses it (`take_worker`, `give_worker_back`).
Between two transports, the worker sends a goodbye to each peer that wants to connect.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import structlog

from pdmesh.core.access.exposure import is_loopback
from pdmesh.errors import KvTransferFailed
from pdmesh.kv.transport.ucx_endpoints import PairedEndpoint, PeerEndpoints, close_endpoint
from pdmesh.kv.transport.ucx_handshake import (
    HANDSHAKE,
    Address,
    Hello,
    make_key,
    read_hello,
    read_welcome,
)

log = structlog.get_logger(__name__)

# `options_for` chooses UCX's TLS (the list of UCX transports) and the devices.
_ENVIRONMENT = {
    "UCX_TCP_TX_SEG_SIZE": "256K",
    "UCX_TCP_RX_SEG_SIZE": "256K",
    "UCX_WARN_UNUSED_ENV_VARS": "n",
    "UCX_KEEPALIVE_INTERVAL": "1s",  # without this, UCX does not notice the end of a silent peer
    # Without this, a peer that falls silent during the handshake blocks the loop for minutes.
    "UCX_TCP_CONN_NB": "y",
    # Messages with an inline payload are sent eagerly. Larger payloads wait for a posted receive.
    "UCX_RNDV_THRESH": "96K",
    # Without these two, UCX silently uses tcp instead of shared memory.
    "UCX_POSIX_ERROR_HANDLING": "y",
    "UCX_SYSV_ERROR_HANDLING": "y",
    # A receiver on the same machine reads large payloads directly from the sender's memory (CMA).
    # With error handling, UCX allows this only if the sender can revoke the access. This value
    # claims that the sender can, although CMA has no revocation. At worst, a late read gets a mix
    # of old and new bytes, which the checksum detects (ADR 0006).
    "UCX_CMA_MEMORY_INVALIDATE": "y",
    # Shared memory moves pieces of this size, and each piece costs a wake-up. The default is 8K and
    # the maximum is 64K.
    "UCX_MM_SEG_SIZE": "60K",
    # The death of a peer is an ordinary event here. UCX's loggers should not report it.
    "UCX_LOG_LEVEL": "fatal",
    "UCXX_LOG_LEVEL": "FATAL",
    "UCXPY_LOG_LEVEL": "CRITICAL",
}
MESSAGE_TAG = 0  # the tag of all frames, which have one shared inbox; payloads have other tags
# The events of some UCX transports do not reach the fd, so the worker also polls at this interval.
# ucxx does the same.
_GUARD_S = 0.5
# The longest time for one turn of progress. A large payload must not block the loop, because a
# decode's next step may be due (S52). `loop.time()` cannot measure this time: under uvloop it
# stands still within a callback.
_TURN_S = 0.0005
MAX_REFUSING = 64  # peers that are being turned away
_REFUSE_S = 5.0
MAX_GIVEN_UP = 256  # remembered connections that ended before their welcome
LENGTH = struct.Struct("<I")  # precedes each message of a frame
# The receiver's connection number, and the number of bytes that follow. 0 means a goodbye.
FRAME = struct.Struct("<QI")


def load_library() -> Any:  # ucxx has no type information
    """Import ucxx, after setting the environment variables that it needs.

    Values that the user has set are kept. Returns `ucxx._lib.libucxx`.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import ucxx
    from ucxx._lib import libucxx

    assert ucxx is not None  # its import loads the shared library
    return libucxx


def is_local(host: str) -> bool:
    """Whether `host` is a loopback address."""
    return is_loopback(host)


def options_for(host: str, *, reaches_gpu: bool = False) -> dict[str, str]:
    """The UCX options of an agent on this host.

    On a loopback address the agent uses tcp on `lo` only. With `reaches_gpu`, payloads may also lie
    in a GPU's memory. For other addresses there are no options. The environment overrides these
    options.
    """
    if not is_local(host):
        return {}
    own = "tcp,cuda_copy,cuda_ipc" if reaches_gpu else "tcp"
    options = {"TLS": own, "NET_DEVICES": "lo"}
    return {name: value for name, value in options.items() if f"UCX_{name}" not in os.environ}


def context_info(options: dict[str, str]) -> str:
    """UCX's description of a context with these options: its devices and transports.

    ucxx's `cuda_support` is no replacement, because it is True even without a GPU. Raises
    KvTransferFailed.
    """
    try:
        context = load_library().UCXContext(options)
    except Exception as error:  # ucxx has a class per UCX status
        raise KvTransferFailed(f"UCX does not start: {error}", reason="KV_NO_TRANSPORT") from error
    _keep_for_good(context)
    return str(context.info)


class UcxWorker:
    """A UCX context with its worker.

    This class progresses the worker, reports completed requests and receives frames. Only one event
    loop uses a worker at a time.
    """

    def __init__(self, options: dict[str, str], inbox_bytes: int) -> None:
        self.api = load_library()
        from ucxx._lib.arr import Array
        from ucxx.types import Tag

        self.array, self.tag = Array, Tag
        self.options = options
        self.is_warm = False  # the first connection of a worker costs each end 30 ms of CPU
        self._context = self.api.UCXContext(options)
        self.worker = self.api.UCXWorker(
            self._context, enable_delayed_submission=False, enable_python_future=False
        )
        self.worker.init_blocking_progress_mode()
        self.address: bytes = self.worker.address.tobytes()
        self.endpoints = PeerEndpoints(self.address, self._make_endpoint)
        self.key = make_key()
        self._refusing: dict[int, PairedEndpoint] = {}  # endpoints that send a goodbye
        # By our connection number: connections that ended before their welcome, oldest first.
        self._given_up: OrderedDict[int, Address] = OrderedDict()
        _keep_for_good(self._context, self.worker)
        self._fd: int = self.worker.epoll_file_descriptor
        self._inbox = np.empty(inbox_bytes, np.uint8)
        self._inbox_array = Array(self._inbox)
        self._post_inbox()
        self._num_connections = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_progressed: Callable[[], bool] = self._turn_away
        self._pending: list[tuple[Any, Callable[[bool], None], object]] = []
        self._is_kicked = False
        self._is_pumping = False
        self._is_stopped = False

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def next_key(self) -> int:
        """A connection number that this worker never uses again.

        Late bytes of an old connection are therefore never taken for bytes of a new one.
        """
        self._num_connections += 1
        return self._num_connections

    def has_fabric(self) -> bool:
        """Whether UCX found an RDMA device (verbs, mlx5, EFA).

        The PyPI wheel of libucx never finds one.
        """
        return any(word in self._context.info for word in ("rc_", "dc_", "ud_", "srd", "ib/"))

    # -- the transport that uses the worker -------------------------------------------------------

    def is_free_for(self, loop: asyncio.AbstractEventLoop) -> bool:
        return self._loop is None or self._loop is loop or self._loop.is_closed()

    def begin(self, on_progressed: Callable[[], bool]) -> None:
        """Serve a transport on the running loop.

        The worker calls `on_progressed` each time it has progressed. `on_progressed` returns
        whether it may have made new work.
        """
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop = loop
            self._is_kicked = False
            loop.add_reader(self._fd, self.pump)
            loop.call_later(_GUARD_S, self._look)
            self.pump()
        self._on_progressed = on_progressed
        self.kick()

    def end(self) -> None:
        """Stop serving the transport. Until the next one begins, turn away peers that connect."""
        self._on_progressed = self._turn_away
        self.endpoints.close_spare()
        self.kick()

    def stop(self) -> None:
        """Never progress again. Pending operations would touch memory that may be reused by now."""
        self._is_stopped = True
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.remove_reader(self._fd)

    def _make_endpoint(self, address: bytes) -> Any:
        there = self.api.UCXAddress.create_from_buffer(address)
        return self.api.UCXEndpoint.create_from_worker_address(self.worker, there, True)

    def turn_away(self, hello: Hello) -> None:
        """Send a goodbye to a peer that connects, so that it need not wait for its deadline."""
        self._dismiss(hello.number, lambda: self.endpoints.answering(hello.worker, hello.turn))

    def _dismiss(self, number: int, make: Callable[[], PairedEndpoint]) -> None:
        if len(self._refusing) >= MAX_REFUSING or self._loop is None:
            return
        key, goodbye = self.next_key(), FRAME.pack(number, 0)
        try:
            endpoint = make()
            request = endpoint.raw.tag_send(self.array(goodbye), self.tag(MESSAGE_TAG))
        except self.api.UCXError:
            return
        self._refusing[key] = endpoint
        self.watch(request, lambda _: self._refused(key), goodbye)
        self._loop.call_later(_REFUSE_S, self._refused, key)

    def give_up(self, number: int, there: Address) -> None:
        """Remember a connection of ours that ended before its welcome.

        The peer may have accepted the connection. If the peer's welcome arrives, the answer is a
        goodbye.
        """
        self._given_up[number] = there
        if len(self._given_up) > MAX_GIVEN_UP:
            self._given_up.popitem(last=False)

    def on_late(self, number: int, body: memoryview) -> None:
        """Handle a frame for an unknown connection. If it is a welcome, answer with a goodbye."""
        there = self._given_up.get(number)
        if there is None or len(body) < LENGTH.size:
            return
        (length,) = LENGTH.unpack_from(body)
        theirs = read_welcome(bytes(body[LENGTH.size : LENGTH.size + length]), number, there.key)
        if theirs is not None:
            del self._given_up[number]
            self._dismiss(theirs.number, lambda: self.endpoints.next(there.worker))

    def _refused(self, key: int) -> None:
        endpoint = self._refusing.pop(key, None)
        if endpoint is not None:
            close_endpoint(endpoint.raw)
            self.kick()

    def _turn_away(self) -> bool:
        return self.read_inbox(self._refuse)

    def _refuse(self, frame: memoryview) -> None:
        number, size = FRAME.unpack_from(frame)
        if size > len(frame) - FRAME.size:
            return
        body = frame[FRAME.size : FRAME.size + size]
        if number != HANDSHAKE:
            self.on_late(number, body)
            return
        hello = read_hello(bytes(body), self.key)
        if hello is not None:
            self.turn_away(hello)

    # -- frames -----------------------------------------------------------------------------------

    def read_inbox(self, on_frame: Callable[[memoryview], None]) -> bool:
        """Call `on_frame` for each frame that has arrived. Returns whether there was one.

        A frame is valid only during the call.
        """
        has_read = False
        while self._inbox_request.completed:
            has_read = True
            try:
                self._inbox_request.check_error()
                on_frame(memoryview(self._inbox))  # type: ignore[arg-type]  # numpy arrays are buffers
            except self.api.UCXError:  # a frame that is too long, from an unknown sender
                log.warning("kv.frame.refused")
            finally:  # without this, no more frames would be received
                self._post_inbox()
        return has_read

    def _post_inbox(self) -> None:
        self._inbox_request = self.worker.tag_recv(self._inbox_array, self.tag(MESSAGE_TAG))

    # -- progress ---------------------------------------------------------------------------------

    def watch(self, request: Any, on_done: Callable[[bool], None], buffer: object) -> None:
        """Call `on_done(is_ok)` from the loop once the request is complete, never within this call.

        The worker keeps a reference to `buffer` until then, because the request keeps none.
        """
        self._pending.append((request, on_done, buffer))
        self.kick()

    def kick(self) -> None:
        """Schedule progress. Call this after posting, because an armed worker may not wake up."""
        if self._loop is None or self._is_kicked or self._is_pumping or self._is_stopped:
            return
        self._is_kicked = True
        self._loop.call_soon(self.pump)

    def pump(self) -> None:
        """Progress until there is no work and the fd is armed, or until `_TURN_S` has passed."""
        self._is_kicked = False
        if self._is_stopped or self._is_pumping:
            return
        self._is_pumping = True
        turn_ends = time.monotonic() + _TURN_S
        try:
            while self._step():
                if time.monotonic() >= turn_ends:
                    self._is_kicked = True
                    assert self._loop is not None
                    self._loop.call_soon(self.pump)
                    return
        finally:
            self._is_pumping = False

    def drain(self, is_done: Callable[[], bool], within_s: float) -> None:
        """Progress until `is_done()`, and block the loop. Only for the end of a transport."""
        ends = time.monotonic() + within_s
        while not is_done() and time.monotonic() < ends:
            self._step()

    def _step(self) -> bool:
        """Progress once. Returns False if there is no work and the fd will report new work."""
        if self._is_stopped:
            return False
        has_work = bool(self.worker.progress_once())
        has_work = self._complete() or has_work
        has_work = self._on_progressed() or has_work
        return has_work or not (self._is_stopped or self.worker.arm())

    def _look(self) -> None:
        if self._is_stopped or self._loop is not asyncio.get_running_loop():
            return
        self._loop.call_later(_GUARD_S, self._look)
        self.pump()

    def _complete(self) -> bool:
        done = [entry for entry in self._pending if entry[0].completed]
        if not done:
            return False
        self._pending = [entry for entry in self._pending if not entry[0].completed]
        for request, on_done, _ in done:
            try:
                on_done(self._is_ok(request))
            except Exception as error:  # other completed requests must still be called back
                log.error("kv.completion.died", exc_info=error)
        return True

    def _is_ok(self, request: Any) -> bool:
        try:
            request.check_error()
        except self.api.UCXError:
            return False
        return True


_idle: list[UcxWorker] = []
_idle_lock = threading.Lock()  # several agents, each on its thread, take and give back workers


def take_worker(options: dict[str, str], inbox_bytes: int) -> UcxWorker:
    """The worker with these options that was given back last, or a new worker."""
    loop = asyncio.get_running_loop()
    with _idle_lock:
        for worker in reversed(_idle):
            if worker.options == options and worker.is_free_for(loop):
                _idle.remove(worker)
                return worker
    return UcxWorker(options, inbox_bytes)


def give_worker_back(worker: UcxWorker, is_quiet: bool) -> None:
    """Give back a worker for the next transport.

    `is_quiet` means that no operation of its last transport can touch memory any more. A worker
    that is not quiet is never used again.
    """
    if not is_quiet:
        log.error("kv.worker.abandoned", num_pending=worker.num_pending)
        worker.stop()
        return
    worker.end()
    with _idle_lock:
        _idle.append(worker)


def _keep_for_good(*objects: object) -> None:
    """Add references that are never dropped, so that the objects outlive even the interpreter."""
    for each in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))

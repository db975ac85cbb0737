"""One UCX worker on one event loop: its event fd wakes the loop, so that idle costs nothing.

ucxx's own asyncio front end either polls or progresses in a thread, and waits for a request by polling it
(`sleep(0)`). Here the loop watches the worker's fd; when it is readable the worker progresses, completed
requests are called back, and the worker is armed again. Nothing is awaited per message.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from typing import Any

import structlog

log = structlog.get_logger(__name__)

# TLS and devices are chosen per transport, see `options_for`.
_ENVIRONMENT = {
    "UCX_TCP_TX_SEG_SIZE": "256K",
    "UCX_TCP_RX_SEG_SIZE": "256K",
    "UCX_WARN_UNUSED_ENV_VARS": "n",
    "UCX_TCP_CONN_NB": "y",  # else a peer that falls silent as it connects stops the loop for minutes
    "UCX_RNDV_THRESH": "96K",  # inline payloads are eager; larger ones meet a posted receive
    "UCX_POSIX_ERROR_HANDLING": "y",  # without these, shared memory is silently dropped for tcp
    "UCX_SYSV_ERROR_HANDLING": "y",
    "UCX_MM_SEG_SIZE": "60K",  # shared memory moves pieces of this size, each with a wake-up; 8K by default, at most 64K
    # A peer that dies is an event here, not an error of the library's: three loggers say so otherwise.
    "UCX_LOG_LEVEL": "fatal",
    "UCXX_LOG_LEVEL": "FATAL",
    "UCXPY_LOG_LEVEL": "CRITICAL",
}
# Some transports' events do not reach the fd (ucxx guards against it too): look now and then.
_GUARD_S = 0.5
# A large payload must not keep the loop to itself. Not by `loop.time()`: uvloop's stands still meanwhile.
_TURN_S = 0.002
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def load_library() -> Any:  # ucxx has no type information
    """Import ucxx with what must be set before; whatever the user has set wins. Returns `ucxx._lib.libucxx`."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import ucxx
    from ucxx._lib import libucxx

    assert ucxx is not None  # its import loads the shared library
    return libucxx


def is_local(host: str) -> bool:
    """Whether `host` names this machine only."""
    return host in _LOOPBACK


def options_for(host: str) -> dict[str, str]:
    """UCX options for an agent of one machine: tcp on loopback. Those in the environment win.

    ucxx's listener takes no address and so listens on every interface; UCX turns away a connection that comes
    in by a device it was not given, which is what keeps an agent on loopback to itself.
    """
    if not is_local(host):
        return {}
    options = {"TLS": "tcp", "NET_DEVICES": "lo"}
    return {name: value for name, value in options.items() if f"UCX_{name}" not in os.environ}


class UcxWorker:
    """Progress and completions of one UCX context. Used on the loop that made it, and only there."""

    def __init__(self, options: dict[str, str], on_progressed: Callable[[], bool]) -> None:
        """`on_progressed` is called after each progress; it returns True if it may have made new work."""
        self.api = load_library()
        self._loop = asyncio.get_running_loop()
        self._context = self.api.UCXContext(options)
        self.worker = self.api.UCXWorker(
            self._context, enable_delayed_submission=False, enable_python_future=False
        )
        self.worker.init_blocking_progress_mode()
        self._fd: int = self.worker.epoll_file_descriptor
        self._on_progressed = on_progressed
        self._pending: list[tuple[Any, Callable[[bool], None], object]] = []
        self._is_kicked = False
        self._is_pumping = False
        self._is_closed = False
        self._loop.add_reader(self._fd, self.pump)
        self._guard = self._loop.call_later(_GUARD_S, self._look)

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def has_fabric(self) -> bool:
        """Whether UCX found an RDMA device (verbs, mlx5, EFA); the PyPI wheel of libucx never does."""
        return any(word in self._context.info for word in ("rc_", "dc_", "ud_", "srd", "ib/"))

    def watch(self, request: Any, on_done: Callable[[bool], None], buffer: object) -> None:
        """Call `on_done(is_ok)` once the request is complete, from the loop and never from here.

        `buffer` is kept alive until then: a request does not hold on to the bytes it reads or writes.
        """
        self._pending.append((request, on_done, buffer))
        self.kick()

    def kick(self) -> None:
        """Progress soon: new operations were posted while the worker may be armed."""
        if not self._is_kicked and not self._is_pumping and not self._is_closed:
            self._is_kicked = True
            self._loop.call_soon(self.pump)

    def pump(self) -> None:
        """Progress until there is nothing to do and arm the fd; or until others on the loop have waited enough."""
        self._is_kicked = False
        if self._is_closed or self._is_pumping:
            return
        self._is_pumping = True
        turn_ends = time.monotonic() + _TURN_S
        try:
            while self._step():
                if time.monotonic() >= turn_ends:
                    self._is_kicked = True
                    self._loop.call_soon(self.pump)
                    return
        finally:
            self._is_pumping = False

    def drain(self, is_done: Callable[[], bool], within_s: float) -> None:
        """Progress, blocking the loop, until `is_done`. For the end of the transport."""
        ends = time.monotonic() + within_s
        while not is_done() and time.monotonic() < ends:
            self._step()

    def close(self) -> None:
        """Cancel what is left and let go of the worker. Endpoints and listeners must be gone by now."""
        if self._is_closed:
            return
        self._is_closed = True
        self._guard.cancel()
        self._loop.remove_reader(self._fd)
        self.worker.cancel_inflight_requests()
        self.worker.progress()
        self._pending.clear()
        del self.worker, self._context

    def _step(self) -> bool:
        """Returns False once there is nothing to do and the fd will tell when there is."""
        if self._is_closed:
            return False
        has_work = bool(self.worker.progress_once())
        has_work = self._complete() or has_work
        has_work = self._on_progressed() or has_work
        return has_work or not (self._is_closed or self.worker.arm())

    def _look(self) -> None:
        self._guard = self._loop.call_later(_GUARD_S, self._look)
        self.pump()

    def _complete(self) -> bool:
        done = [entry for entry in self._pending if entry[0].completed]
        if not done:
            return False
        self._pending = [entry for entry in self._pending if not entry[0].completed]
        for request, on_done, _ in done:
            try:
                on_done(self._is_ok(request))
            except Exception as error:  # others have ended with it, and hear of it once
                log.error("kv.completion.died", exc_info=error)
        return True

    def _is_ok(self, request: Any) -> bool:
        try:
            request.check_error()
        except self.api.UCXError:
            return False
        return True

"""A JetStream key-value bucket that survives restarts of the server and the loss of its data (F21).

nats-py's own watcher needs 18 s to notice a restarted server, so KvWatch replaces it. KvWatch opens
a plain push consumer and checks the consumer's heartbeats. It opens a new consumer when the server
comes back, when a heartbeat or a message is missing, or when the bucket is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import structlog
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.js import api
from nats.js.errors import APIError, NoStreamResponseError, NotFoundError

from pdmesh.errors import Unavailable
from pdmesh.net.nats.buckets import SHARED
from pdmesh.net.nats.bus import NatsBus
from pdmesh.net.tasks import end

log = structlog.get_logger(__name__)

ALL_KEYS: Final = ">"
_REQUEST_S: Final = 1.0
_HEARTBEAT_S: Final = 0.5
_SILENCE_S: Final = 1.5  # a watch opens a new consumer if nothing arrives for this time
_BACKOFF_S: Final = (0.1, 1.0)
_TRIES: Final = 3  # deliveries of an entry to a callback that raises
_WRONG_SEQUENCE: Final = (10071, 10164)
_NAME_IN_USE: Final = 10058
_OPERATION: Final = "KV-Operation"  # set by a client that deletes
_MARKER: Final = "Nats-Marker-Reason"  # set by the server when a value expires
_EXPECTED: Final = "Nats-Expected-Last-Subject-Sequence"


@dataclass(frozen=True, slots=True)
class KvEntry:
    """The bucket's entry for a key.

    `value` is None if the key was deleted or has expired. `is_expired` is True if it has expired.
    """

    key: str
    value: bytes | None
    revision: int
    is_expired: bool = False


class WrongRevision(Exception):
    """The key is not at the expected revision.

    Another writer has changed the key, or the bucket has lost its data.
    """


class KvBucket:
    """One bucket in file storage, with the latest entry of each key.

    Entries expire after `ttl_s`; with 0 they stay. The server reports the expiry of a value to
    watchers, except in a bucket that several roles write (`lease_ends`). Methods that read or write
    values, or open a consumer, raise Unavailable within about a second if the server does not
    answer.
    """

    def __init__(self, bus: NatsBus, name: str, ttl_s: float = 0.0) -> None:
        self._bus = bus
        self._js = bus.jetstream(_REQUEST_S)
        self.name = name
        self.stream = f"KV_{name}"
        self._prefix = f"$KV.{name}."
        self._ttl_s = ttl_s
        self._tells_ends = ttl_s > 0 and name not in SHARED

    async def ensure(self) -> None:
        """Make the bucket if it is absent. Update its settings if they differ.

        Does nothing in a process that may not make buckets. Writes of such a process raise
        Unavailable until a master has made the bucket.
        """
        await self._ensure()

    async def _ensure(self) -> bool:
        """Do what `ensure` does. Returns whether the bucket was absent and has been made."""
        if not self._bus.makes_buckets:
            return False
        config = api.StreamConfig(
            name=self.stream,
            subjects=[f"{self._prefix}>"],
            storage=api.StorageType.FILE,
            max_msgs_per_subject=1,
            max_age=self._ttl_s,
            allow_msg_ttl=True,
            subject_delete_marker_ttl=max(1.0, self._ttl_s) if self._tells_ends else None,
            # Rollup headers would let a writer of one key empty the bucket. In a stream with expiry
            # markers, NATS allows these headers regardless of this setting.
            allow_rollup_hdrs=False,
            deny_delete=True,
            allow_direct=True,
            discard=api.DiscardPolicy.NEW,
            duplicate_window=min(self._ttl_s or 120.0, 120.0),
            num_replicas=self._bus.num_replicas or 1,
        )
        with _translated(self.name):
            try:
                made = await self._js.add_stream(config)
            except APIError as exc:
                if exc.err_code != _NAME_IN_USE:
                    raise
                await self._update(config)
                return False
        return bool(made.did_create)

    async def _update(self, config: api.StreamConfig) -> None:
        """Update the settings. Keeps the number of replicas if this process does not know it."""
        if self._bus.num_replicas is None:
            found = await self._js.stream_info(self.stream)
            config.num_replicas = found.config.num_replicas
        await self._js.update_stream(config)

    async def get(self, key: str) -> KvEntry | None:
        """The latest entry of the key, even if the key was deleted. None if there is no entry."""
        with _translated(self.name):
            try:
                msg = await self._js.get_msg(self.stream, subject=self._prefix + key, direct=False)
            except NotFoundError:
                return None
        return _entry(key, msg.data, msg.headers or {}, int(msg.seq))

    async def put(self, key: str, value: bytes, last: int | None = None) -> int:
        """Write a value and return the new revision.

        If `last` is given, this raises WrongRevision unless the key is at revision `last`. The
        revision of a key without an entry is 0.
        """
        headers = None if last is None else {_EXPECTED: str(last)}
        return await self._publish(key, value, headers)

    async def delete(self, key: str, last: int | None = None) -> int:
        """Remove the key and return the new revision. Raises the same errors as `put`."""
        headers = {_OPERATION: "DEL"}
        if last is not None:
            headers[_EXPECTED] = str(last)
        return await self._publish(key, b"", headers)

    async def _publish(self, key: str, value: bytes, headers: dict[str, str] | None) -> int:
        with _translated(self.name):
            try:
                ack = await self._js.publish(self._prefix + key, value, headers=headers)
            except NoStreamResponseError:
                # The bucket was wiped. Or, in a cluster, it has no leader for some seconds.
                is_wiped = await self._ensure()
                if headers and headers.get(_EXPECTED, "0") != "0":
                    if not is_wiped:
                        raise
                    raise WrongRevision(key) from None  # revisions from before the wipe are void
                ack = await self._js.publish(self._prefix + key, value, headers=headers)
            except APIError as exc:
                if exc.err_code in _WRONG_SEQUENCE:
                    raise WrongRevision(key) from None
                raise
        return int(ack.seq)

    def watch(
        self,
        on_entry: Callable[[KvEntry], None],
        on_loaded: Callable[[], None],
        on_reset: Callable[[], None],
        key: str = ALL_KEYS,
    ) -> KvWatch:
        """Follow one key, or all keys.

        Each time the watch opens a consumer, it calls `on_reset`, then `on_entry` for each current
        entry, then `on_loaded`. After that it calls `on_entry` for each new entry.
        """
        return KvWatch(self._bus, self, on_entry, on_loaded, on_reset, key)

    async def open_consumer(self, inbox: str, key: str = ALL_KEYS) -> tuple[str, int]:
        """Open a consumer that pushes each key's latest entry to `inbox`, and then each new entry.

        Returns the consumer's name, and the number of entries that it has not delivered yet.
        """
        config = api.ConsumerConfig(
            # If the consumer has a name, the subject of this request ends with the filter. Then
            # permissions can allow a single filter.
            name=secrets.token_hex(12),
            deliver_subject=inbox,
            deliver_policy=api.DeliverPolicy.LAST_PER_SUBJECT,
            ack_policy=api.AckPolicy.NONE,
            filter_subject=self._prefix + key,
            idle_heartbeat=_HEARTBEAT_S,
            inactive_threshold=5.0,
            mem_storage=True,
            num_replicas=1,
            max_deliver=1,
        )
        with _translated(self.name):
            try:
                info = await self._js.add_consumer(self.stream, config=config)
            except NotFoundError:
                await self.ensure()
                info = await self._js.add_consumer(self.stream, config=config)
        return str(info.name), int(info.num_pending or 0)

    async def close_consumer(self, name: str) -> None:
        with contextlib.suppress(NatsError, APIError, TimeoutError):
            await self._js.delete_consumer(self.stream, name)

    def key_of(self, subject: str) -> str:
        return subject.removeprefix(self._prefix)


class KvWatch:
    """Follows a bucket until `close`. Opens a new consumer whenever its consumer breaks.

    Callbacks run on the event loop, in the bucket's order. If `on_entry` raises for an entry, the
    watch delivers all entries again. After a few failures, the watch leaves the entry out, so that
    the watch can become live.
    """

    def __init__(
        self,
        bus: NatsBus,
        bucket: KvBucket,
        on_entry: Callable[[KvEntry], None],
        on_loaded: Callable[[], None],
        on_reset: Callable[[], None],
        key: str = ALL_KEYS,
    ) -> None:
        self._bus, self._bucket, self._key = bus, bucket, key
        self._on_entry, self._on_loaded, self._on_reset = on_entry, on_loaded, on_reset
        self._heard = asyncio.Event()
        self._broken = asyncio.Event()
        self._next_delivery = 1
        self._is_loaded = False
        self._failed: dict[str, tuple[int, int]] = {}  # by key: revision, number of failures
        self._forget = bus.on_restored(self._broken.set)
        self._task = asyncio.create_task(self._run(), name=f"kv-watch-{bucket.name}")

    @property
    def is_live(self) -> bool:
        """Whether the callbacks are up to date: the watch has delivered all current entries.

        Entries that were left out do not count.
        """
        return self._is_loaded and not self._broken.is_set() and self._bus.is_connected

    async def close(self) -> None:
        self._forget()
        await end([self._task])

    async def _run(self) -> None:
        backoff = _BACKOFF_S[0]
        while True:
            try:
                await self._follow()
                backoff = _BACKOFF_S[0]
            except (Unavailable, NatsError) as exc:
                log.debug("kv.watch_failed", bucket=self._bucket.name, error=str(exc))
                backoff = min(backoff * 2, _BACKOFF_S[1])
            except Exception:  # a bug in a callback; the next consumer delivers all entries again
                log.exception("kv.watch_bug", bucket=self._bucket.name)
                backoff = min(backoff * 2, _BACKOFF_S[1])
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))

    async def _follow(self) -> None:
        """Open a consumer and follow it until it breaks."""
        self._broken.clear()
        self._is_loaded, self._next_delivery = False, 1
        inbox = self._bus.client.new_inbox()
        self._on_reset()
        subscription = await self._bus.client.subscribe(inbox, cb=self._on_message)
        name = ""
        try:
            name, num_pending = await self._bucket.open_consumer(inbox, self._key)
            if num_pending == 0:
                self._loaded()
            await self._until_broken()
        finally:
            self._broken.set()
            with contextlib.suppress(NatsError):
                await subscription.unsubscribe()
            if name and self._bus.is_connected:
                await self._bucket.close_consumer(name)

    async def _until_broken(self) -> None:
        while not self._broken.is_set():
            self._heard.clear()
            try:
                async with asyncio.timeout(_SILENCE_S):
                    await self._heard.wait()
            except TimeoutError:
                log.info("kv.watch_silent", bucket=self._bucket.name)
                return

    async def _on_message(self, msg: Msg) -> None:
        self._heard.set()
        if self._broken.is_set():
            return
        headers = msg.headers or {}
        if not msg.reply:  # a heartbeat, which has the number of the last delivery
            if int(headers.get("Nats-Last-Consumer", "0")) != self._next_delivery - 1:
                self._broken.set()
            return
        at = msg.metadata
        if at.sequence.consumer != self._next_delivery:
            self._broken.set()
            return
        self._next_delivery += 1
        key = self._bucket.key_of(msg.subject)
        try:
            self._hand_out(_entry(key, msg.data, headers, at.sequence.stream))
            if at.num_pending == 0:
                self._loaded()
        except Exception:  # a bug in a callback; the next consumer delivers all entries again
            log.exception("kv.watch_bug", bucket=self._bucket.name, key=key)
            self._broken.set()

    def _hand_out(self, entry: KvEntry) -> None:
        try:
            self._on_entry(entry)
        except Exception:
            revision, num = self._failed.get(entry.key, (0, 0))
            num = num + 1 if revision == entry.revision else 1
            self._failed[entry.key] = (entry.revision, num)
            if num < _TRIES:
                raise
            log.exception("kv.entry_left_out", bucket=self._bucket.name, key=entry.key)
        else:
            self._failed.pop(entry.key, None)

    def _loaded(self) -> None:
        if not self._is_loaded:
            self._is_loaded = True
            self._on_loaded()


def _entry(key: str, data: bytes | None, headers: Any, revision: int) -> KvEntry:
    if _MARKER in headers:
        return KvEntry(key, None, revision, is_expired=headers[_MARKER] == "MaxAge")
    if _OPERATION in headers:
        return KvEntry(key, None, revision)
    return KvEntry(key, data or b"", revision)


@contextlib.contextmanager
def _translated(bucket: str) -> Iterator[None]:
    try:
        yield
    except (NatsError, OSError, TimeoutError) as exc:
        reason = str(exc) or type(exc).__name__
        raise Unavailable(f"NATS bucket {bucket}: {reason}") from exc

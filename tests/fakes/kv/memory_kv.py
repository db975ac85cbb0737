"""A fake of JetStream's key-value buckets (`KvBucket`) in one process.

The bucket has revisions, removal markers, outages and loss of all data. Watches get changes at
once.
"""

from __future__ import annotations

from collections.abc import Callable

from pdmesh.errors import Unavailable
from pdmesh.net.nats.kv_bucket import ALL_KEYS, KvEntry, WrongRevision


class MemoryBucket:
    def __init__(self) -> None:
        self.entries: dict[str, KvEntry] = {}
        self.watches: list[MemoryWatch] = []
        self.revision = 0
        self.is_up = True

    async def ensure(self) -> None:
        self._check_up()

    async def get(self, key: str) -> KvEntry | None:
        self._check_up()
        return self.entries.get(key)

    async def put(self, key: str, value: bytes, last: int | None = None) -> int:
        return self._write(key, value, last)

    async def delete(self, key: str, last: int | None = None) -> int:
        return self._write(key, None, last)

    def watch(
        self,
        on_entry: Callable[[KvEntry], None],
        on_loaded: Callable[[], None],
        on_reset: Callable[[], None],
        key: str = ALL_KEYS,
    ) -> MemoryWatch:
        watch = MemoryWatch(self, on_entry, on_loaded, on_reset, key)
        self.watches.append(watch)
        return watch

    def lose(self) -> None:
        """Start an outage of the server."""
        self.is_up = False

    def come_back(self, *, is_wiped: bool = False) -> None:
        """End the outage. Watches get changes again only after they `open` again."""
        self.is_up = True
        for watch in self.watches:
            watch.is_live = False
        if is_wiped:
            self.entries, self.revision = {}, 0

    def _check_up(self) -> None:
        if not self.is_up:
            raise Unavailable("the store is away")

    def _write(self, key: str, value: bytes | None, last: int | None) -> int:
        self._check_up()
        before = self.entries[key].revision if key in self.entries else 0
        if last is not None and last != before:
            raise WrongRevision(key)
        self.revision += 1
        self.entries[key] = KvEntry(key, value, self.revision)
        for watch in self.watches:
            watch.tell(self.entries[key])
        return self.revision


class MemoryWatch:
    def __init__(
        self,
        bucket: MemoryBucket,
        on_entry: Callable[[KvEntry], None],
        on_loaded: Callable[[], None],
        on_reset: Callable[[], None],
        key: str,
    ) -> None:
        self._bucket, self._key = bucket, key
        self._on_entry, self._on_loaded, self._on_reset = on_entry, on_loaded, on_reset
        self._is_open = False

    @property
    def is_live(self) -> bool:
        return self._is_open and self._bucket.is_up

    @is_live.setter
    def is_live(self, value: bool) -> None:
        self._is_open = value

    def open(self) -> None:
        """Send all current values again."""
        self._on_reset()
        for entry in list(self._bucket.entries.values()):
            if self._key in (ALL_KEYS, entry.key):
                self._on_entry(entry)
        self._is_open = True
        self._on_loaded()

    def tell(self, entry: KvEntry) -> None:
        if self.is_live and self._key in (ALL_KEYS, entry.key):
            self._on_entry(entry)

    async def close(self) -> None:
        self._bucket.watches.remove(self)

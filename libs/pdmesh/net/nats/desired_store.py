"""Stores the desired state (the groups that the mesh should have) in the bucket `pdmesh-desired`.

The key `current` has the version number, the text and the author of the current version, so a
single write makes a new version. Before that, the current version is copied to another key, such as
`v7`. A writer that dies between the two steps leaves only an extra copy. Further keys have the
adjustments and the state of the upgrades. An adjustment is a change that was made by moving
instances between groups, not by a new version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, TypeVar

import structlog
from google.protobuf.json_format import MessageToJson, Parse, ParseError
from google.protobuf.message import Message

from pdmesh.errors import NotLeader, VersionConflict
from pdmesh.net.nats.buckets import DESIRED
from pdmesh.net.nats.bus import NatsBus
from pdmesh.net.nats.kv_bucket import (
    KvBucket,
    KvEntry,
    KvWatch,
    WrongRevision,
)
from pdmesh.v1.admin_service_pb2 import Adjustments, DesiredVersion, Upgrades

log = structlog.get_logger(__name__)

VERSIONS_KEPT: Final = 100
_UNCONDITIONAL_TRIES: Final = 5
CURRENT: Final = "current"
ADJUSTED: Final = "adjusted"
UPGRADES: Final = "upgrades"
_KEYS: Final = (CURRENT, ADJUSTED, UPGRADES)

M = TypeVar("M", bound=Message)


class DesiredStore:
    """Reads and writes raise Unavailable within about a second if the store does not answer."""

    def __init__(self, bucket: KvBucket) -> None:
        self._bucket = bucket

    async def version(self, number: int = 0) -> DesiredVersion | None:
        """Version `number`, or the current version for 0. None if there is no such version."""
        current = _parse(await self._get_current())
        if current is None or number in (0, current.version):
            return current
        return _parse(await self._bucket.get(_key(number)))

    async def versions(self, limit: int) -> list[DesiredVersion]:
        """The latest stored versions, at most `limit`, beginning with the current version."""
        current = _parse(await self._get_current())
        if current is None:
            return []
        first = max(1, current.version - VERSIONS_KEPT)
        numbers = range(current.version - 1, max(first, current.version - limit + 1) - 1, -1)
        entries = await asyncio.gather(*(self._bucket.get(_key(number)) for number in numbers))
        return [current, *(each for each in map(_parse, entries) if each is not None)]

    async def apply(
        self,
        text: str,
        *,
        expected_version: int | None,
        author: str,
        reason: str,
        canary_share: float = 0.0,
        known: DesiredVersion | None = None,
    ) -> tuple[DesiredVersion, int]:
        """Make `text` the next version. Returns the version and the revision of its key.

        `known` is the latest version that the caller has seen. If the store was wiped and lacks
        that version, `known` counts as current, so that no version number is used twice.

        Raises VersionConflict if `expected_version` is given and is not the current version.
        Without it, any current version is replaced. If other writers apply versions at the same
        time, this then retries a few times before it raises VersionConflict.
        """
        num_tries = 1 if expected_version is not None else _UNCONDITIONAL_TRIES
        after = DesiredVersion(text=text, author=author, reason=reason, canary_share=canary_share)
        while True:
            num_tries -= 1
            try:
                return after, await self._apply_once(after, expected_version, known)
            except VersionConflict:
                if not num_tries:
                    raise

    async def _apply_once(
        self, after: DesiredVersion, expected_version: int | None, known: DesiredVersion | None
    ) -> int:
        found = await self._get_current()
        current = _later(_parse(found), known)
        number = current.version if current is not None else 0
        if expected_version is not None and expected_version != number:
            raise VersionConflict(f"version {number} is current, not {expected_version}")
        if current is not None:
            await self._bucket.put(_key(number), _encode(current))
        after.version = number + 1
        after.applied_at.GetCurrentTime()
        try:
            revision = await self._bucket.put(
                CURRENT, _encode(after), last=found.revision if found else 0
            )
        except WrongRevision as exc:
            raise VersionConflict("another writer has just changed the desired state") from exc
        if number > VERSIONS_KEPT:
            await self._bucket.delete(_key(number - VERSIONS_KEPT))
        return revision

    async def adjust(self, adjustments: Adjustments, last: int) -> int:
        """Replace the adjustments of revision `last`. Returns the new revision.

        `last` is 0 if there are none. Raises VersionConflict if another writer has written
        adjustments since. The caller should then decide again from the new ones. Raises NotLeader
        if a leader of a later epoch (the number of a leadership) has written adjustments, even if
        `last` is their revision.
        """
        return await self._replace(ADJUSTED, adjustments, last)

    async def keep_upgrades(self, upgrades: Upgrades, last: int) -> int:
        """Replace the state of the upgrades. Returns and raises like `adjust`."""
        return await self._replace(UPGRADES, upgrades, last)

    async def _replace(self, key: str, message: Adjustments | Upgrades, last: int) -> int:
        await self._bucket.ensure()
        before = _parse_as(await self._bucket.get(key), type(message))
        if before is not None and before.epoch > message.epoch:
            raise NotLeader(f"epoch {before.epoch} has written {key} since")
        try:
            return await self._bucket.put(key, _encode(message), last=last)
        except WrongRevision as exc:
            raise VersionConflict(f"another writer has just changed {key}") from exc

    def book(self) -> DesiredBook:
        return DesiredBook(self, self._bucket)

    def watch_current(self, on_version: Callable[[DesiredVersion], None]) -> KvWatch:
        """Deliver the current version now, after each change, and after an outage."""

        def on_entry(entry: KvEntry) -> None:
            if (version := _parse(entry)) is not None:
                on_version(version)

        return self._bucket.watch(on_entry, lambda: None, lambda: None, key=CURRENT)

    def watch_upgrades(self, on_upgrades: Callable[[Upgrades], None]) -> KvWatch:
        """Deliver the state of the upgrades now, after each change, and after an outage."""

        def on_entry(entry: KvEntry) -> None:
            if (upgrades := _parse_as(entry, Upgrades)) is not None:
                on_upgrades(upgrades)

        return self._bucket.watch(on_entry, lambda: None, lambda: None, key=UPGRADES)

    async def _get_current(self) -> KvEntry | None:
        await self._bucket.ensure()
        return await self._bucket.get(CURRENT)


class DesiredBook:
    """A live copy of the desired state, through which the leading master reads and writes it.

    `follow` opens the book. Own writes are visible at once. The book keeps its contents while the
    store is unreachable, and when the store is wiped.
    """

    def __init__(self, store: DesiredStore, bucket: KvBucket) -> None:
        self._store, self._bucket = store, bucket
        self.current: DesiredVersion | None = None
        self.adjustments = Adjustments()
        self.upgrades = Upgrades()
        self.missing: set[str] = set()  # keys that were wiped from the bucket and not yet restored
        self._revisions: dict[str, int] = {}  # by key, as last seen
        self._on_change: Callable[[], None] = lambda: None
        self._seen: set[str] = set()  # keys that the bucket has ever had
        self._unseen: set[str] = set()  # keys of `_seen` that a reopened watch has not shown yet
        self._loaded = {key: asyncio.Event() for key in _KEYS}
        self._watches: list[KvWatch] = []

    def follow(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._watches = [self._watch(key) for key in _KEYS]

    def _watch(self, key: str) -> KvWatch:
        return self._bucket.watch(
            self._on_entry, lambda: self._on_loaded(key), lambda: self._on_reset(key), key=key
        )

    @property
    def is_current(self) -> bool:
        """Whether the book is up to date.

        False while the store is unreachable or not fully read. Do not decide from the book then.
        """
        return bool(self._watches) and all(watch.is_live for watch in self._watches)

    async def until_loaded(self) -> None:
        for loaded in self._loaded.values():
            await loaded.wait()

    async def close(self) -> None:
        for watch in self._watches:
            await watch.close()

    def _on_reset(self, key: str) -> None:
        self._unseen |= self._seen & {key}

    def _on_loaded(self, key: str) -> None:
        if key in self._unseen:  # the bucket was wiped, because these keys are never deleted
            self._unseen.discard(key)
            self._revisions.pop(key, None)
            self.missing.add(key)
            log.warning("desired.lost", key=key)
            self._on_change()
        self._loaded[key].set()

    async def version(self, number: int = 0) -> DesiredVersion | None:
        """Like `DesiredStore.version`, read from the store."""
        return await self._store.version(number)

    async def versions(self, limit: int) -> list[DesiredVersion]:
        """Like `DesiredStore.versions`, read from the store."""
        return await self._store.versions(limit)

    async def apply(
        self,
        text: str,
        *,
        expected_version: int | None,
        author: str,
        reason: str,
        canary_share: float = 0.0,
    ) -> DesiredVersion:
        """Like `DesiredStore.apply`."""
        applied, revision = await self._store.apply(
            text,
            expected_version=expected_version,
            author=author,
            reason=reason,
            canary_share=canary_share,
            known=self.current,
        )
        if self._is_latest(CURRENT, revision):
            self.current = applied
            self._on_change()
        return applied

    async def adjust(self, adjustments: Adjustments) -> None:
        """Replace `self.adjustments`. Raises the same errors as `DesiredStore.adjust`."""
        revision = await self._store.adjust(adjustments, self._revisions.get(ADJUSTED, 0))
        if self._is_latest(ADJUSTED, revision):
            self.adjustments = adjustments
            self._on_change()

    async def keep_upgrades(self, upgrades: Upgrades) -> None:
        """Replace `self.upgrades`. Raises the same errors as `DesiredStore.adjust`."""
        revision = await self._store.keep_upgrades(upgrades, self._revisions.get(UPGRADES, 0))
        if self._is_latest(UPGRADES, revision):
            self.upgrades = upgrades
            self._on_change()

    async def restore(self) -> None:
        """Write the wiped keys back to the bucket from this book (F21).

        A key that another writer has written since the wipe stays unchanged. Earlier versions are
        lost, because no process keeps them in memory.
        """
        known: dict[str, Message | None] = {
            CURRENT: self.current,
            ADJUSTED: self.adjustments,
            UPGRADES: self.upgrades,
        }
        for key in sorted(self.missing):
            message = known[key]
            assert message is not None
            try:
                self._revisions[key] = await self._bucket.put(key, _encode(message), last=0)
                log.warning("desired.restored", key=key)
            except WrongRevision:
                log.info("desired.not_restored", key=key)
            self.missing.discard(key)

    def _is_latest(self, key: str, revision: int) -> bool:
        """Note our own write. Returns False if a later write arrived before the answer to ours."""
        if revision < self._revisions.get(key, 0):
            return False
        self._seen.add(key)
        self._revisions[key] = revision
        return True

    def _on_entry(self, entry: KvEntry) -> None:
        is_reopening = entry.key in self._unseen
        self._unseen.discard(entry.key)
        self.missing.discard(entry.key)
        if entry.revision < self._revisions.get(entry.key, 0) and not is_reopening:
            return  # our own write is later than this entry
        self._revisions[entry.key] = entry.revision
        if entry.key == CURRENT:
            self._on_current(entry)
        elif entry.key == ADJUSTED:
            self._on_adjusted(entry)
        else:
            self._on_upgrades(entry)

    def _on_adjusted(self, entry: KvEntry) -> None:
        adjustments = _parse_as(entry, Adjustments)
        if adjustments is None:
            return
        self._seen.add(ADJUSTED)
        if adjustments != self.adjustments:
            self.adjustments = adjustments
            self._on_change()

    def _on_upgrades(self, entry: KvEntry) -> None:
        upgrades = _parse_as(entry, Upgrades)
        if upgrades is None:
            return
        self._seen.add(UPGRADES)
        if upgrades != self.upgrades:
            self.upgrades = upgrades
            self._on_change()

    def _on_current(self, entry: KvEntry) -> None:
        version = _parse(entry)
        if version is None:
            return
        self._seen.add(CURRENT)
        if version != self.current:
            self.current = version
            self._on_change()


def desired_store(bus: NatsBus) -> DesiredStore:
    return DesiredStore(KvBucket(bus, DESIRED))


def _key(number: int) -> str:
    return f"v{number}"


def _later(one: DesiredVersion | None, other: DesiredVersion | None) -> DesiredVersion | None:
    if one is None or other is None:
        return one or other
    return max(one, other, key=lambda version: version.version)


def _encode(message: Message) -> bytes:
    return MessageToJson(message, indent=None).encode()


def _parse(entry: KvEntry | None) -> DesiredVersion | None:
    return _parse_as(entry, DesiredVersion)


def _parse_as(entry: KvEntry | None, kind: type[M]) -> M | None:
    if entry is None or entry.value is None:
        return None
    try:
        return Parse(entry.value, kind(), ignore_unknown_fields=True)
    except ParseError:
        log.warning("desired.bad_value", key=entry.key)
        return None

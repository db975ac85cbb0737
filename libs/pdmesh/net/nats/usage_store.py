"""Stores the usage book in the bucket `pdmesh-usage`, under one key.

Usage is the time of instances by service, scenario (a kind of requests), group and pool (a borrower
of groups). A write succeeds only if its writer has read or written the latest revision.
"""

from __future__ import annotations

from typing import Final

import structlog
from google.protobuf.json_format import MessageToJson, Parse, ParseError

from pdmesh.errors import VersionConflict
from pdmesh.net.nats.buckets import USAGE
from pdmesh.net.nats.bus import NatsBus
from pdmesh.net.nats.kv_bucket import KvBucket, WrongRevision
from pdmesh.v1.admin_service_pb2 import UsageBook

log = structlog.get_logger(__name__)

_KEY: Final = "book"


class UsageStore:
    """Both methods raise Unavailable within about a second if the store does not answer."""

    def __init__(self, bucket: KvBucket) -> None:
        self._bucket = bucket
        self._revision = 0

    async def load(self) -> UsageBook | None:
        """The stored book. None if no book was ever stored, or if it cannot be parsed."""
        await self._bucket.ensure()
        found = await self._bucket.get(_KEY)
        self._revision = found.revision if found is not None else 0
        if found is None or found.value is None:
            return None
        try:
            return Parse(found.value, UsageBook(), ignore_unknown_fields=True)
        except ParseError:
            log.warning("usage.bad_value")
            return None

    async def save(self, book: UsageBook) -> None:
        """Store the book.

        Raises VersionConflict if another writer has stored a book since the last `load` or `save`.
        The caller should then load again.
        """
        value = MessageToJson(book, indent=None).encode()
        try:
            self._revision = await self._bucket.put(_KEY, value, last=self._revision)
        except WrongRevision as exc:
            raise VersionConflict("another writer has just changed the usage book") from exc


def usage_store(bus: NatsBus) -> UsageStore:
    return UsageStore(KvBucket(bus, USAGE))

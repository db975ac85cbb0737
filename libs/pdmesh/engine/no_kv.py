"""Answers to calls about KV and adapters, for the engines of pooling instances and encoders.

These engines have no KV and no adapters. Admission refuses jobs that need KV or adapters before
such jobs reach the engine.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pdmesh.core.adapters.fit import AdapterFacts
from pdmesh.core.kv.prefix.pins import PinnedPrefix
from pdmesh.engine.base import DecodeJob, KvPeer, Prefetch, PrefillJob, SessionHint
from pdmesh.errors import AdapterUnusable, KvTransferFailed


class NoKv:
    """The methods of `Engine` that an engine without KV must have but does not use."""

    def prefill(self, job: PrefillJob) -> None:
        raise AssertionError("admission refuses prompts here")

    def decode(self, job: DecodeJob) -> None:
        raise AssertionError("admission refuses decodes here")

    def join(self, leg: int, first_token: int) -> None:
        """No request awaits a token."""

    def embedded(self, leg: int, encoder: KvPeer | None) -> None:
        """No request awaits embeddings."""

    def release(self, ticket_id: str) -> None:
        """No KV is staged here."""

    async def verify_peer(self, peer: KvPeer, timeout_s: float) -> None:
        raise KvTransferFailed("an instance of this role pulls no KV")

    def forget_peer(self, peer: KvPeer) -> None:
        """There is no connection."""

    def pin(self, prefixes: Sequence[PinnedPrefix]) -> None:
        """There are no KV tiers."""

    def note_session(self, hint: SessionHint) -> None:
        pass

    def prefetch(self, wanted: Prefetch) -> None:
        """There are no KV tiers."""

    async def inspect_adapter(self, path: str) -> AdapterFacts:
        raise AdapterUnusable("an instance of this role takes no adapters")

    def keep_adapters(self, digests: Collection[str]) -> None:
        """There are no adapters."""

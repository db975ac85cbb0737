"""The counters and histograms of an instance's legs, KV transfers and tiers, for /metrics."""

from __future__ import annotations

from typing import Final

from pdmesh.core.instance.admission import RefusalReason
from pdmesh.core.kv.tier import Tier
from pdmesh.kv.tiers.report import FAULTS, TierReport
from pdmesh.telemetry import metrics, names

admissions: Final = metrics.counter(
    names.ADMISSIONS, "Legs asked for, by outcome: accepted, or the reason of the rejection"
)
legs_ended: Final = metrics.counter(names.LEGS_ENDED, "Legs that ended, by outcome")
tokens: Final = metrics.counter(names.INSTANCE_TOKENS, "Tokens drawn by this instance")
transfer_s: Final = metrics.histogram(
    names.KV_TRANSFER_DURATION, "From Start to the KV being usable at decode"
)
transfer_bytes: Final = metrics.counter(names.KV_TRANSFER_BYTES, "KV bytes pulled by decode", "By")
transfer_failures: Final = metrics.counter(
    names.KV_TRANSFER_FAILURES, "Pulls of KV that failed at decode, by the KV agent's reason"
)
computed_tokens: Final = metrics.counter(
    names.KV_COMPUTED_TOKENS, "Prompt tokens that decode computed itself; 0 while hand-overs work"
)
batch_size: Final = metrics.histogram(
    names.BATCH_SIZE, "Sequences per step", "1", [2.0**n for n in range(10)]
)
sessions_cut: Final = metrics.counter(
    names.SESSIONS_CUT, "Sessions cut because the gateway did not read"
)
unknown_commands: Final = metrics.counter(
    names.UNKNOWN_COMMANDS, "Commands ignored because only a later release knows them"
)

tickets_closed: Final = metrics.counter(names.KV_TICKETS_CLOSED, "Tickets closed, by reason")
errors_dropped: Final = metrics.counter(names.ERRORS_DROPPED, "ErrorReported events not published")

images_encoded: Final = metrics.counter(
    names.IMAGES_ENCODED, "Images that this encoder encoded; it holds their embeddings for others"
)

tier_blocks: Final = metrics.counter(
    names.KV_TIER_BLOCKS, "KV blocks by tier and event; served ones were not computed"
)
tier_seconds: Final = metrics.counter(names.KV_TIER_SECONDS, "Total time of loads from a tier", "s")
tier_faults: Final = metrics.counter(
    names.KV_TIER_FAULTS,
    "Changes of a tier's state, by reason: read-only, off, recovered",
    known=[
        {names.ATTR_TIER: tier.value, names.ATTR_REASON: reason.lower()} for tier, reason in FAULTS
    ],
)
tier_bytes_used: Final[dict[str, int]] = {}  # by tier, as last reported
tier_pinned: Final[dict[str, int]] = {}
tier_leased: Final[dict[str, int]] = {}

adapter_changes: Final = metrics.counter(
    names.ADAPTER_CHANGES, "LoRA adapters by event: loaded, unloaded, failed"
)
adapter_load_s: Final = metrics.histogram(
    names.ADAPTER_LOAD_DURATION, "From the first request for a LoRA adapter to its use"
)

ACCEPTED: Final = {names.ATTR_OUTCOME: "accepted"}
REFUSED: Final = {reason: {names.ATTR_OUTCOME: reason.name.lower()} for reason in RefusalReason}

metrics.gauge(
    names.KV_TIER_BYTES,
    "Bytes of KV in a tier",
    lambda: [(used, {names.ATTR_TIER: tier}) for tier, used in tier_bytes_used.items()],
    "By",
)
metrics.gauge(
    names.KV_TIER_PINNED,
    "Blocks of pinned prefixes in a tier; the file store counts none",
    lambda: [(count, {names.ATTR_TIER: tier}) for tier, count in tier_pinned.items()],
)
metrics.gauge(
    names.KV_TIER_LEASED,
    "Blocks of a tier that cannot be evicted because they are being read; 0 when idle",
    lambda: [(count, {names.ATTR_TIER: tier}) for tier, count in tier_leased.items()],
)
load_seconds: Final[dict[str, float]] = {}  # seconds of the present load, by part
metrics.gauge(
    names.LOAD_SECONDS,
    "Time from blank to ready, by part: fetch, verify, build, connect",
    lambda: [(seconds, {names.ATTR_PART: part}) for part, seconds in load_seconds.items()],
    "s",
)
peer_checks: Final = metrics.counter(
    names.PEER_CHECKS, "Probes of KV connections to peers, by outcome: verified, or the reason"
)


def forget_tiers() -> None:
    """Clear the tiers' numbers, which the engine of an ended incarnation reported."""
    for by_tier in (tier_bytes_used, tier_pinned, tier_leased):
        by_tier.clear()


def count_tiers(report: TierReport) -> None:
    for (tier, event), num_blocks in report.counts.items():
        tier_blocks.add(num_blocks, {names.ATTR_TIER: tier, names.ATTR_EVENT: event})
    for tier, seconds in report.seconds.items():
        tier_seconds.add(seconds, {names.ATTR_TIER: tier})
    for fault in report.faults:
        tier_faults.add(
            1, {names.ATTR_TIER: fault.tier.value, names.ATTR_REASON: fault.reason.lower()}
        )
    tier_bytes_used.update(report.bytes_used)
    if report.num_pinned is not None:
        tier_pinned[Tier.HOST.value] = report.num_pinned
    if report.num_leased is not None:
        tier_leased[Tier.HOST.value] = report.num_leased

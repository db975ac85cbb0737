"""What an instance counts and measures."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from pdmesh.core.instance.admission import RefusalReason
from pdmesh.core.kv.tiers.load_plan import Tier
from pdmesh.core.kv.transfer.source_exclusions import SourceFault
from pdmesh.kv.tiers.report import TierReport
from pdmesh.telemetry import metrics, names

if TYPE_CHECKING:
    from pdmesh.instance.legs.host import InstanceHost

admissions: Final = metrics.counter(
    names.ADMISSIONS, "Legs asked for, by outcome: accepted, or the reason of the rejection"
)
legs_ended: Final = metrics.counter(names.LEGS_ENDED, "Legs that ended, by outcome")
tokens: Final = metrics.counter(names.INSTANCE_TOKENS, "Tokens drawn here")
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

tickets_closed: Final = metrics.counter(names.KV_TICKETS_CLOSED, "Tickets closed, by reason")
errors_dropped: Final = metrics.counter(names.ERRORS_DROPPED, "ErrorReported events not published")

tier_blocks: Final = metrics.counter(
    names.KV_TIER_BLOCKS, "KV blocks by tier and event; served ones were not computed"
)
tier_seconds: Final = metrics.counter(
    names.KV_TIER_SECONDS, "Time that loads from a tier took, one after another", "s"
)
tier_faults: Final = metrics.counter(
    names.KV_TIER_FAULTS, "Changes of a tier's state, by reason: read-only, off, recovered"
)
tier_bytes_used: Final[dict[str, int]] = {}  # by tier, as last reported
tier_pinned: Final[dict[str, int]] = {}
tier_leased: Final[dict[str, int]] = {}

ACCEPTED: Final = {names.ATTR_OUTCOME: "accepted"}
REFUSED: Final = {reason: {names.ATTR_OUTCOME: reason.name.lower()} for reason in RefusalReason}


class _Shown:
    """Whose state is at /metrics: the present run's, or nobody's."""

    host: InstanceHost | None = None


def show(host: InstanceHost | None) -> None:
    """Show this host's state at /metrics from now on; None: the instance was erased."""
    _Shown.host = host
    tier_bytes_used.clear()
    tier_pinned.clear()
    tier_leased.clear()
    if host is None:
        load_seconds.clear()


def _gauge(name: str, help_text: str, read: Callable[[InstanceHost], float], unit: str) -> None:
    def observe() -> Iterable[tuple[float, metrics.Labels]]:
        return [] if _Shown.host is None else [(read(_Shown.host), {})]

    metrics.gauge(name, help_text, observe, unit)


for _name, _help, _read, _unit in (
    (names.SLOTS, "Legs it takes at once", lambda h: h.admission.num_places, "1"),
    (names.SLOTS_USED, "Slots held", lambda h: h.admission.num_slots_used, "1"),
    (names.KV_BLOCKS_FREE, "KV blocks not reserved", lambda h: h.admission.num_blocks_free, "1"),
    (
        names.KV_ENGINE_BLOCKS_FREE,
        "KV blocks that no sequence of the engine holds, evictable ones included",
        lambda h: h.num_engine_blocks_free,
        "1",
    ),
    (
        names.KV_CONNECTIONS,
        "Open KV connections of all ranks, whoever opened them",
        lambda h: h.num_kv_connections,
        "1",
    ),
    (names.KV_TICKETS, "Prefills with a ticket", lambda h: h.num_tickets, "1"),
    (names.STAGING_BYTES_USED, "Staging arena", lambda h: h.admission.staging_bytes_used, "By"),
    (names.LANDING_BYTES_USED, "Landing arena", lambda h: h.admission.landing_bytes_used, "By"),
    (names.RETRIEVALS, "Requests whose KV is not here", lambda h: h.admission.num_retrieving, "1"),
    (names.PULLS_QUEUED, "KV pulls that wait their turn", lambda h: h.num_pulls_queued, "1"),
    (names.SESSIONS, "Open gateway sessions", lambda h: h.num_sessions, "1"),
):
    _gauge(_name, _help, _read, _unit)
metrics.gauge(
    names.KV_SOURCES_HELD,
    "Senders of KV in quarantine here, by fault",
    lambda: (
        []
        if (host := _Shown.host) is None
        else [
            (host.num_sources_held(fault), {names.ATTR_REASON: fault.value})
            for fault in SourceFault
        ]
    ),
)
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
    "Blocks of a tier that a request or a peer reads, so that they stay; 0 at rest",
    lambda: [(count, {names.ATTR_TIER: tier}) for tier, count in tier_leased.items()],
)
load_seconds: Final[dict[str, float]] = {}  # of the present run, by part
metrics.gauge(
    names.LOAD_SECONDS,
    "Time from blank to ready, by part: fetch, verify, build, connect",
    lambda: [(seconds, {names.ATTR_PART: part}) for part, seconds in load_seconds.items()],
    "s",
)
peer_checks: Final = metrics.counter(
    names.PEER_CHECKS, "Probes of KV connections to peers, by outcome: verified, or the reason"
)


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

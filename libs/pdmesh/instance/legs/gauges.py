"""Gauges and totals at /metrics that each scrape reads from the instance's host and engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from pdmesh.core.kv.transfer.source_exclusions import SourceFault
from pdmesh.engine.awaited_embeddings import EmbeddingOutcome
from pdmesh.instance.legs import instruments
from pdmesh.instance.legs.host import InstanceHost, Speculated
from pdmesh.telemetry import metrics, names, vllm_names


class _Shown:
    """The host whose state /metrics shows, or None while no engine serves."""

    host: InstanceHost | None = None
    scenario = ""


def show(host: InstanceHost | None, scenario: str = "", model: str = "") -> None:
    """Show this host's state at /metrics from now on. With None, /metrics shows no host."""
    _Shown.host, _Shown.scenario = host, scenario
    vllm_names.serve(model)
    instruments.forget_tiers()
    if host is None:
        instruments.load_seconds.clear()


def _gauge(name: str, help_text: str, read: Callable[[InstanceHost], float], unit: str) -> None:
    def observe() -> Iterable[tuple[float, metrics.Labels]]:
        return [] if _Shown.host is None else [(read(_Shown.host), {})]

    metrics.gauge(name, help_text, observe, unit)


for _name, _help, _read, _unit in (
    (names.SLOTS, "Legs that the instance can run at once", lambda h: h.admission.num_places, "1"),
    (names.SLOTS_USED, "Slots in use", lambda h: h.admission.num_slots_used, "1"),
    (names.KV_BLOCKS_FREE, "KV blocks not reserved", lambda h: h.admission.num_blocks_free, "1"),
    (
        names.KV_ENGINE_BLOCKS_FREE,
        "KV blocks that no sequence of the engine holds, evictable ones included",
        lambda h: h.num_engine_blocks_free,
        "1",
    ),
    (
        names.KV_ENGINE_USAGE,
        "Share of the engine's KV blocks that sequences hold",
        lambda h: 1 - h.num_engine_blocks_free / h.admission.capacity.num_blocks,
        "1",
    ),
    (
        names.KV_CONNECTIONS,
        "Open KV connections of all ranks, opened by either side",
        lambda h: h.num_kv_connections,
        "1",
    ),
    (names.KV_TICKETS, "Prefill legs with an open ticket", lambda h: h.num_tickets, "1"),
    (
        names.STAGING_BYTES_USED,
        "Bytes used in the staging arena",
        lambda h: h.admission.staging_bytes_used,
        "By",
    ),
    (
        names.LANDING_BYTES_USED,
        "Bytes used in the landing arena",
        lambda h: h.admission.landing_bytes_used,
        "By",
    ),
    (
        names.RETRIEVALS,
        "Requests whose KV has not arrived",
        lambda h: h.admission.num_retrieving,
        "1",
    ),
    (names.PULLS_QUEUED, "KV pulls that wait for their turn", lambda h: h.num_pulls_queued, "1"),
    (names.ADAPTERS_LOADED, "LoRA adapters in slots", lambda h: len(h.loaded_adapters), "1"),
    (names.SESSIONS, "Open gateway sessions", lambda h: h.num_sessions, "1"),
):
    _gauge(_name, _help, _read, _unit)


def _engine_total(
    name: str, help_text: str, labels_of: Mapping[str, metrics.Labels], unit: str = "1"
) -> None:
    metrics.total(name, help_text, lambda: engine_counts(labels_of), unit)


def engine_counts(
    labels_of: Mapping[str, metrics.Labels],
) -> Iterable[tuple[float, metrics.Labels]]:
    """The engine's own counters. `labels_of` maps a counter's name in the engine to its labels."""
    numbers = {} if _Shown.host is None else _Shown.host.engine_numbers
    return [(numbers[own], labels) for own, labels in labels_of.items() if own in numbers]


_engine_total(names.ENGINE_STEPS, "Steps that computed tokens", {"num_steps": {}})
_engine_total(
    names.ENGINE_STEPS_STEADY,
    "Steady steps: those with the same requests as the step before",
    {"num_steady": {}},
)
_engine_total(
    names.ENGINE_STEPS_OVERLAPPED,
    "Steady steps that were scheduled while the step before was computed",
    {"num_overlapped": {}},
)
_engine_total(
    names.ENGINE_STEP_SECONDS,
    "Time of steps, by part: schedule, compute, process, and gap (a rank waits for a steady step)",
    {f"{part}_s": {names.ATTR_PART: part} for part in ("schedule", "compute", "process", "gap")},
    "s",
)
_engine_total(
    names.ENGINE_TOKENS_PAST_END,
    "Tokens computed for requests that had ended",
    {"num_tokens_past_end": {}},
)
_engine_total(
    names.IMAGES_AWAITED,
    "Images whose embeddings an encoder was to make, by outcome: fetched, or encoded here because "
    "they were not_made, late, lost, or skipped after failures",
    {f"num_embeddings_{o.value}": {names.ATTR_OUTCOME: o.value} for o in EmbeddingOutcome},
)
metrics.gauge(
    names.KV_SOURCES_EXCLUDED,
    "Sources of KV that this decode ejects or avoids, by fault",
    lambda: (
        []
        if (host := _Shown.host) is None
        else [
            (host.num_sources_excluded(fault), {names.ATTR_REASON: fault.value})
            for fault in SourceFault
        ]
    ),
)


def speculated() -> Iterable[tuple[float, metrics.Labels]]:
    """Return nothing before the first proposal, because most instances never propose tokens."""
    if (found := _found()) is None:
        return []
    labels = {names.ATTR_SCENARIO: _Shown.scenario}
    return [
        (found.num_accepted, {**labels, names.ATTR_OUTCOME: "accepted"}),
        (found.num_rejected, {**labels, names.ATTR_OUTCOME: "rejected"}),
    ]


def proposals() -> Iterable[tuple[float, metrics.Labels]]:
    if (found := _found()) is None:
        return []
    return [(found.num_proposals, {names.ATTR_SCENARIO: _Shown.scenario})]


def _found() -> Speculated | None:
    counted = _Shown.host.speculated if _Shown.host is not None else None
    return counted if counted is not None and counted.num_proposals else None


metrics.total(
    names.SPECULATION_PROPOSALS,
    "Proposals that a decode checked, by scenario; pdmesh.speculation.tokens has their tokens",
    proposals,
)
metrics.total(
    names.SPECULATION_TOKENS,
    "Proposed tokens that a decode checked, by scenario and outcome: accepted, rejected",
    speculated,
)

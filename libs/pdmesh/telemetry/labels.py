"""The labels of each metric, on which dashboards and alerts rely.

A metric that is not in this table has no labels. `metrics.py` checks each new set of labels against
the table, so code cannot add or rename a label without a change here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from pdmesh.telemetry import names

_CALL: Final = (names.ATTR_OPERATION, names.ATTR_PROVIDER, names.ATTR_REQUEST_MODEL)
_OURS: Final = ("pdmesh.", "gen_ai.")

LABELS: Final[Mapping[str, tuple[str, ...]]] = {
    names.REQUEST_DURATION: (*_CALL, names.ATTR_ERROR_TYPE),
    names.TIME_TO_FIRST_TOKEN: _CALL,
    names.TIME_PER_OUTPUT_TOKEN: _CALL,
    names.GC_PAUSE: ("generation",),
    # The gateway.
    names.REQUESTS: (names.ATTR_OUTCOME, names.ATTR_REASON, names.ATTR_REQUEST_MODEL),
    names.WAITING_REQUESTS: ("priority",),
    names.WAIT_DURATION: (names.ATTR_OUTCOME,),
    names.REFUSED_UNASKED: (names.ATTR_REASON,),
    names.SESSION_HINTS: ("state",),
    names.SCENARIO_CHOSEN: (names.ATTR_SCENARIO, "by"),
    names.TTFT_SLO: (names.ATTR_SCENARIO, names.ATTR_OUTCOME),
    names.GATEWAY_TOKENS: ("direction", names.ATTR_REQUEST_MODEL),
    names.GATEWAY_CACHED_TOKENS: (names.ATTR_REQUEST_MODEL,),
    names.GATEWAY_PLANS: ("source",),
    names.GATEWAY_HANDED_IGNORED: (names.ATTR_REASON,),
    names.PICKER_PICKS: (names.ATTR_OUTCOME,),
    names.PICKER_REFUSED: (names.ATTR_REASON,),
    names.PICKER_DURATION: (names.ATTR_OUTCOME,),
    names.GATEWAY_TOKENIZER_LOADS: (names.ATTR_OUTCOME,),
    names.GATEWAY_PARSER_STARTS: (names.ATTR_OUTCOME,),
    names.GATEWAY_ENCODED_PROMPTS: (names.ATTR_OUTCOME,),
    names.GATEWAY_REFUSED: (names.ATTR_TENANT, names.ATTR_REASON),
    names.TENANT_TOKENS: (names.ATTR_TENANT,),
    names.OIDC_FETCHES: (names.ATTR_OUTCOME,),
    names.GATEWAY_RESPONSES_KEPT: ("outcome",),
    names.GATEWAY_RESPONSES_LOOKUPS: ("outcome",),
    # Instances.
    names.ADMISSIONS: (names.ATTR_OUTCOME,),
    names.KV_TRANSFER_FAILURES: (names.ATTR_REASON,),
    names.KV_SOURCES_EXCLUDED: (names.ATTR_REASON,),
    names.KV_TICKETS_CLOSED: (names.ATTR_REASON,),
    names.KV_TIER_BLOCKS: (names.ATTR_TIER, names.ATTR_EVENT),
    names.KV_TIER_SECONDS: (names.ATTR_TIER,),
    names.KV_TIER_BYTES: (names.ATTR_TIER,),
    names.KV_TIER_PINNED: (names.ATTR_TIER,),
    names.KV_TIER_LEASED: (names.ATTR_TIER,),
    names.KV_TIER_FAULTS: (names.ATTR_TIER, names.ATTR_REASON),
    names.LEGS_ENDED: (names.ATTR_OUTCOME,),
    names.SPECULATION_PROPOSALS: (names.ATTR_SCENARIO,),
    names.SPECULATION_TOKENS: (names.ATTR_SCENARIO, names.ATTR_OUTCOME),
    names.ENGINE_STEP_SECONDS: (names.ATTR_PART,),
    names.ADAPTER_CHANGES: (names.ATTR_EVENT,),
    names.IMAGES_AWAITED: (names.ATTR_OUTCOME,),
    names.LOAD_SECONDS: (names.ATTR_PART,),
    names.PEER_CHECKS: (names.ATTR_OUTCOME,),
    # Bus, index, health-monitor and master.
    names.BUS_DROPPED: (names.ATTR_REASON,),
    names.INDEX_SNAPSHOTS: (names.ATTR_OUTCOME,),
    names.HEALTH_STATES: ("health",),
    names.HEALTH_CHANGES: (names.ATTR_OUTCOME,),
    names.HEALTH_FAULTS: ("level", "held_back"),
    names.CANARY_PROBES: (names.ATTR_OUTCOME,),
    names.NODE_DEVICES: ("level",),
    names.GROUP_WANTED: ("group", "role"),
    names.GROUP_STATE: ("group", "state"),
    names.GROUP_STEPS: (names.ATTR_STEP,),
    names.UPGRADE_STEPS: (names.ATTR_STEP,),
    names.GROUP_ROUNDS_SKIPPED: (names.ATTR_REASON,),
    names.USAGE: ("service", "scenario", "group", "pool"),
    names.PLANS: (names.ATTR_OUTCOME,),
    **dict.fromkeys(
        (
            names.SCENARIO_QUEUE,
            names.SCENARIO_T_P,
            names.SCENARIO_DECODE_QUEUE,
            names.SCENARIO_T_D,
            names.SCENARIO_XI,
            names.SCENARIO_TPOT,
            names.SCENARIO_HITS,
            names.SCENARIO_T_P_SHARE,
            names.SCENARIO_PHI,
            names.SCENARIO_WAITING,
        ),
        ("scenario",),
    ),
    names.SCENARIO_RATE: ("scenario", "term"),
    names.SCENARIO_INSTANCES: ("scenario", "role"),
    names.SCENARIO_SLOTS: ("scenario", "role"),
    names.PREDICTION_ERROR: ("kind",),
    names.PREDICTION_OBSERVED: ("kind",),
}


def labels_of(metric: str) -> tuple[str, ...]:
    return LABELS.get(metric, ())


def check(metric: str, labels: Iterable[str]) -> None:
    """Raises AssertionError if a metric of ours has a label that the table does not list for it."""
    if metric.startswith(_OURS):
        unknown = set(labels) - set(labels_of(metric))
        assert not unknown, f"{metric} has no label {sorted(unknown)}: see telemetry/labels.py"

"""The dashboard of KV: between prefill and decode, in the tiers, and in the index."""

from __future__ import annotations

from typing import Final

from tools.observe.dashboard import Dashboard, Panel, Row, Variable
from tools.observe.queries import HERE, NO_FAULT, quantiles, rate

KV: Final = Dashboard(
    "pdmesh-kv",
    "pdmesh / KV and tiers",
    "Does KV arrive, is memory for it short, do the tiers and the index help",
    (
        Row(
            "Does KV arrive?",
            (
                Panel(
                    "Pulled by decodes",
                    "Bytes per second",
                    {"{{instance}}": rate("pdmesh_kv_transfer_bytes_total", "instance", HERE)},
                    "Bps",
                ),
                Panel(
                    "Time of a transfer",
                    "From Start until the KV is usable at decode",
                    quantiles("pdmesh_kv_transfer_duration_seconds", HERE),
                    "s",
                ),
                Panel(
                    "Pulls that failed",
                    "By the KV agent's reason (docs/operations.md)",
                    {
                        "{{instance}} {{pdmesh_reason}}": rate(
                            "pdmesh_kv_transfer_failures_total",
                            "instance, pdmesh_reason",
                            HERE,
                        )
                    },
                    empty_when=NO_FAULT,
                ),
                Panel(
                    "Prompt tokens computed again",
                    "At decode; 0 while hand-overs work",
                    {"{{instance}}": rate("pdmesh_kv_computed_tokens_total", "instance", HERE)},
                ),
                Panel(
                    "Waiting for KV",
                    "Requests whose KV has not arrived, and pulls that wait for their turn",
                    {
                        "{{instance}} requests": f"pdmesh_kv_retrievals{{{HERE}}}",
                        "{{instance}} pulls": f"pdmesh_kv_pulls_queued{{{HERE}}}",
                    },
                ),
                Panel(
                    "Sources that decodes avoid",
                    "By fault",
                    {"{{instance}} {{pdmesh_reason}}": f"pdmesh_kv_sources_excluded{{{HERE}}}"},
                ),
            ),
        ),
        Row(
            "Is memory short?",
            (
                Panel(
                    "Arenas",
                    "Bytes of KV that waits to be sent, and that has arrived",
                    {
                        "{{instance}} staging": f"pdmesh_kv_staging_used_bytes{{{HERE}}}",
                        "{{instance}} landing": f"pdmesh_kv_landing_used_bytes{{{HERE}}}",
                    },
                    "bytes",
                ),
                Panel(
                    "Open tickets",
                    "Prefill legs whose KV was not taken yet; above 0 without load: a leak",
                    {"{{instance}}": f"pdmesh_kv_tickets{{{HERE}}}"},
                ),
                Panel(
                    "Tickets closed",
                    "By reason",
                    {
                        "{{pdmesh_reason}}": rate(
                            "pdmesh_kv_tickets_closed_total", "pdmesh_reason", HERE
                        )
                    },
                ),
            ),
        ),
        Row(
            "Do the tiers help?",
            (
                Panel(
                    "Blocks by tier and event",
                    "Served ones were not computed",
                    {
                        "{{tier}} {{event}}": rate(
                            "pdmesh_kv_tier_blocks_total", "tier, event", HERE
                        )
                    },
                ),
                Panel(
                    "Bytes in tiers",
                    "By instance",
                    {"{{instance}} {{tier}}": f"pdmesh_kv_tier_used_bytes{{{HERE}}}"},
                    "bytes",
                ),
                Panel(
                    "Time of a block's load",
                    "Mean, by tier",
                    {
                        "{{tier}}": rate("pdmesh_kv_tier_load_seconds_total", "tier", HERE)
                        + " / "
                        + rate("pdmesh_kv_tier_blocks_total", "tier", f'{HERE}, event="served"')
                    },
                    "s",
                    empty_when="until a tier has served a block",
                ),
                Panel(
                    "Blocks that stay",
                    "Pinned ones, and ones that are being read",
                    {
                        "{{instance}} pinned": f"pdmesh_kv_tier_pinned_blocks{{{HERE}}}",
                        "{{instance}} read": f"pdmesh_kv_tier_leased_blocks{{{HERE}}}",
                    },
                    empty_when="until a prefix is pinned and a block is read",
                ),
                Panel(
                    "Faults of tiers",
                    "Changes of their state, by reason",
                    {
                        "{{instance}} {{tier}} {{pdmesh_reason}}": rate(
                            "pdmesh_kv_tier_faults_total",
                            "instance, tier, pdmesh_reason",
                            HERE,
                        )
                    },
                    empty_when=NO_FAULT,
                ),
            ),
        ),
        Row(
            "Is the index up to date?",
            (
                Panel(
                    "Blocks indexed",
                    "Over all instances",
                    {"{{instance}}": "pdmesh_index_blocks"},
                ),
                Panel(
                    "Behind",
                    "How long the worst instance has had missing deltas",
                    {"{{instance}}": "pdmesh_index_age_seconds"},
                    "s",
                ),
                Panel(
                    "Delay of deltas",
                    "From publishing until the index has it",
                    quantiles("pdmesh_index_delta_delay_seconds"),
                    "s",
                ),
                Panel(
                    "Gaps and snapshots",
                    "Missing deltas, and the snapshots that repair them",
                    {
                        "gaps": rate("pdmesh_index_gaps_total"),
                        "snapshots {{pdmesh_outcome}}": rate(
                            "pdmesh_index_snapshots_total", "pdmesh_outcome"
                        ),
                    },
                ),
                Panel(
                    "Redis",
                    "Up while it accepts writes; instances that are not written yet; failed calls",
                    {
                        "up": "min(pdmesh_index_store_up)",
                        "pending": "max(pdmesh_index_store_pending)",
                        "errors": rate("pdmesh_index_store_errors_total"),
                    },
                ),
                Panel(
                    "Entries dropped for lack of room",
                    "Above 0: prompts are computed again that some instance holds",
                    {"{{instance}}": rate("pdmesh_index_evicted_total", "instance")},
                ),
            ),
        ),
    ),
    (Variable("instance", "pdmesh_slots", "instance"),),
)

"""The dashboard of one instance: its load, what it refuses, its memory and its engine."""

from __future__ import annotations

from typing import Final

from tools.observe.dashboard import Dashboard, Panel, Row, Variable
from tools.observe.queries import HERE, INTERVAL, rate

INSTANCE: Final = Dashboard(
    "pdmesh-instance",
    "pdmesh / Instance",
    "What an instance does, what it refuses, and what its memory and engine are doing",
    (
        Row(
            "What does it do?",
            (
                Panel(
                    "Slots in use",
                    "And how many it has",
                    {
                        "{{instance}}": f"pdmesh_slots_used{{{HERE}}}",
                        "{{instance}} has": f"pdmesh_slots{{{HERE}}}",
                    },
                ),
                Panel(
                    "Tokens drawn",
                    "Per second",
                    {"{{instance}}": rate("pdmesh_instance_tokens_total", "instance", HERE)},
                ),
                Panel(
                    "Sequences per step",
                    "Median",
                    {
                        "{{instance}}": "histogram_quantile(0.5, "
                        + rate("pdmesh_instance_batch_size_bucket", "le, instance", HERE)
                        + ")"
                    },
                ),
                Panel(
                    "Legs asked for",
                    "Accepted, or the reason of the refusal",
                    {
                        "{{instance}} {{pdmesh_outcome}}": rate(
                            "pdmesh_admissions_total", "instance, pdmesh_outcome", HERE
                        )
                    },
                    "reqps",
                ),
                Panel(
                    "Legs ended",
                    "Failed ones: see leg.failed in the instance's log",
                    {
                        "{{instance}} {{pdmesh_outcome}}": rate(
                            "pdmesh_legs_ended_total", "instance, pdmesh_outcome", HERE
                        )
                    },
                    "reqps",
                ),
                Panel(
                    "Gateway sessions",
                    "Open ones, and those cut because the gateway did not read",
                    {
                        "{{instance}}": f"pdmesh_sessions{{{HERE}}}",
                        "{{instance}} cut": rate("pdmesh_sessions_cut_total", "instance", HERE),
                    },
                ),
            ),
        ),
        Row(
            "Its memory",
            (
                Panel(
                    "KV blocks not reserved",
                    "Near 0: admission refuses",
                    {"{{instance}}": f"pdmesh_kv_blocks_free{{{HERE}}}"},
                ),
                Panel(
                    "KV blocks in use",
                    "Share of the engine's blocks that sequences hold; the rest may be evicted",
                    {"{{instance}}": f"pdmesh_kv_engine_usage{{{HERE}}}"},
                    "percentunit",
                ),
                Panel(
                    "Resident memory",
                    "Of the instance's process",
                    {"{{instance}}": f"process_resident_memory_bytes{{{HERE}}}"},
                    "bytes",
                ),
            ),
        ),
        Row(
            "Its process and engine",
            (
                Panel(
                    "Ready",
                    "1 if /health/ready answers 200",
                    {"{{instance}}": f"pdmesh_process_ready{{{HERE}}}"},
                ),
                Panel(
                    "Event loop",
                    "How late timers are, and the part that this process caused",
                    {
                        "{{instance}} late": f"pdmesh_process_loop_lag_seconds{{{HERE}}}",
                        "{{instance}} held": f"pdmesh_process_loop_held_seconds{{{HERE}}}",
                    },
                    "s",
                ),
                Panel(
                    "CPU",
                    "Cores of the instance's process",
                    {"{{instance}}": f"rate(process_cpu_seconds_total{{{HERE}}}{INTERVAL})"},
                ),
                Panel(
                    "Time of steps, by part",
                    "gap: a rank waited for a step that went on with the same requests",
                    {
                        "{{instance}} {{part}}": rate(
                            "pdmesh_engine_step_seconds_total", "instance, part", HERE
                        )
                    },
                    "s",
                    empty_when="without vLLM: other engines do not time their steps",
                ),
                Panel(
                    "From blank to ready",
                    "By part, of the present run",
                    {"{{instance}} {{part}}": f"pdmesh_instance_load_seconds{{{HERE}}}"},
                    "s",
                    "table",
                    empty_when="for instances that were never blank",
                ),
                Panel(
                    "Probes of KV connections",
                    "Verified, or the reason",
                    {
                        "{{instance}} {{pdmesh_outcome}}": rate(
                            "pdmesh_instance_peer_checks_total",
                            "instance, pdmesh_outcome",
                            HERE,
                        )
                    },
                    empty_when="for instances that were never blank",
                ),
                Panel(
                    "LoRA adapters",
                    "In slots",
                    {"{{instance}}": f"pdmesh_adapters_loaded{{{HERE}}}"},
                ),
                Panel(
                    "Changes of LoRA adapters",
                    "Loaded, unloaded, failed",
                    {
                        "{{instance}} {{event}}": rate(
                            "pdmesh_adapter_changes_total", "instance, event", HERE
                        )
                    },
                    empty_when="until an adapter is loaded",
                ),
                Panel(
                    "Devices by level",
                    "As each node's agent reports; 2 and more is a fault",
                    {
                        "{{instance}} level {{level}}": (
                            "max by (instance, level) (pdmesh_node_devices)"
                        )
                    },
                    empty_when="without node agents",
                ),
            ),
        ),
    ),
    (Variable("instance", "pdmesh_slots", "instance"),),
)

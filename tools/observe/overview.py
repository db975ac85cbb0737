"""The dashboard to open first: is the mesh well, and if not, which part is faulty."""

from __future__ import annotations

from typing import Final

from tools.observe.dashboard import Dashboard, Panel, Row
from tools.observe.queries import NO_FAULT, or_zero, quantiles, rate

_TTFT: Final = "gen_ai_server_time_to_first_token_seconds"
_TPOT: Final = "gen_ai_server_time_per_output_token_seconds"

OVERVIEW: Final = Dashboard(
    "pdmesh-overview",
    "pdmesh / Overview",
    "Is the mesh well, and if not: where to look next",
    (
        Row(
            "Now",
            (
                Panel(
                    "Alerts",
                    "How many alerts fire",
                    {"": or_zero('count(ALERTS{alertstate="firing", alertname=~"Pdmesh.*"})')},
                    kind="stat",
                    width=3,
                    bad_above=1,
                ),
                Panel(
                    "Calls",
                    "Calls that end, per second",
                    {"": rate("pdmesh_requests_total")},
                    "reqps",
                    "stat",
                    3,
                ),
                Panel(
                    "Failed",
                    "Share of calls that fail, whatever the reason",
                    {
                        "": or_zero(rate("pdmesh_requests_total", "", 'pdmesh_outcome="failed"'))
                        + f" / {rate('pdmesh_requests_total')}"
                    },
                    "percentunit",
                    "stat",
                    3,
                    bad_above=0.01,
                ),
                Panel(
                    "TTFT kept",
                    "Share of calls whose first token came within their scenario's TTFT",
                    {
                        "": or_zero(rate("pdmesh_slo_ttft_total", "", 'pdmesh_outcome="met"'))
                        + f" / {rate('pdmesh_slo_ttft_total')}"
                    },
                    "percentunit",
                    "stat",
                    3,
                    bad_below=0.99,
                ),
                Panel(
                    "Slots in use",
                    "Share of the slots of all instances",
                    {"": "sum(pdmesh_slots_used) / sum(pdmesh_slots)"},
                    "percentunit",
                    "stat",
                    3,
                    bad_above=0.9,
                ),
                Panel(
                    "Usable instances",
                    "Instances that the master can place requests on",
                    {"": "max(pdmesh_fleet_instances)"},
                    kind="stat",
                    width=3,
                    bad_below=1,
                ),
                Panel(
                    "Leaders",
                    "Masters that lead: always one",
                    {"": "sum(pdmesh_leader)"},
                    kind="stat",
                    width=3,
                    bad_below=1,
                ),
                Panel(
                    "Silent processes",
                    "Processes that Prometheus cannot scrape",
                    {"": 'count(up{job="pdmesh"}) - sum(up{job="pdmesh"})'},
                    kind="stat",
                    width=3,
                    bad_above=1,
                ),
            ),
        ),
        Row(
            "Do clients get answers?",
            (
                Panel(
                    "Calls by outcome",
                    "Cancelled: the client went away",
                    {"{{pdmesh_outcome}}": rate("pdmesh_requests_total", "pdmesh_outcome")},
                    "reqps",
                    is_stacked=True,
                ),
                Panel(
                    "Why calls fail",
                    "Reasons as in docs/operations.md and docs/api.md",
                    {
                        "{{pdmesh_reason}}": rate(
                            "pdmesh_requests_total", "pdmesh_reason", 'pdmesh_outcome="failed"'
                        )
                    },
                    "reqps",
                    empty_when=NO_FAULT,
                ),
                Panel(
                    "Tokens",
                    "Input: of prompts; output: of answers",
                    {"{{direction}}": rate("pdmesh_gateway_tokens_total", "direction")},
                    "short",
                ),
                Panel("TTFT", "From acceptance to the first token", quantiles(_TTFT), "s"),
                Panel("Time per token", "Mean of each call's answer", quantiles(_TPOT), "s"),
                Panel(
                    "Requests moved to another instance",
                    "Above 0: instances are lost while they serve",
                    {"migrations": rate("pdmesh_request_migrations_total")},
                    "reqps",
                ),
            ),
        ),
        Row(
            "Is there capacity?",
            (
                Panel(
                    "Waiting for a slot",
                    "At the gateways, by priority; 0 is the most urgent",
                    {"priority {{priority}}": "sum by (priority) (pdmesh_gateway_waiting)"},
                ),
                Panel(
                    "Refused for lack of room",
                    "By a full waiting room, or unasked because of the queue's length",
                    {
                        "waiting room full": rate("pdmesh_gateway_waiting_refused_total"),
                        "unasked": or_zero(rate("pdmesh_gateway_refused_unasked_total")),
                        "displaced": rate("pdmesh_gateway_waiting_evicted_total"),
                    },
                    "reqps",
                ),
                Panel(
                    "Slots in use, by instance",
                    "Share of each instance's slots",
                    {"{{instance}}": "pdmesh_slots_used / (pdmesh_slots > 0)"},
                    "percentunit",
                ),
            ),
        ),
        Row(
            "Is the control plane well?",
            (
                Panel(
                    "Leader",
                    "1: this master leads",
                    {"{{instance}}": "pdmesh_leader"},
                ),
                Panel(
                    "Ages",
                    "Of what the masters know; an age that exceeds a few seconds is too old",
                    {
                        "registry, {{instance}}": "pdmesh_registry_view_age_seconds",
                        "load reports, {{instance}}": "pdmesh_fleet_load_age_seconds",
                        "index, {{instance}}": "pdmesh_index_age_seconds",
                    },
                    "s",
                ),
                Panel(
                    "Time to plan",
                    "Of one query, at the master",
                    quantiles("pdmesh_plan_duration_seconds"),
                    "s",
                ),
                Panel(
                    "Plans by source",
                    "Fallback: gateways ranked instances themselves, since no master answered",
                    {"{{source}}": rate("pdmesh_gateway_plans_total", "source")},
                    "reqps",
                ),
                Panel(
                    "Health of processes",
                    "As the health-monitor judges",
                    {"{{health}}": "max by (health) (pdmesh_health_instances)"},
                ),
                Panel(
                    "Instances with a fault",
                    "By level (docs/operations.md), and by what holds the action back",
                    {
                        "level {{level}} {{held_back}}": (
                            "max by (level, held_back) (pdmesh_health_faults)"
                        )
                    },
                    empty_when="while no instance has a fault",
                ),
                Panel(
                    "Event loops blocked",
                    "By the process's own computing; it answers nothing during that time",
                    {"{{instance}}": "topk(8, pdmesh_process_loop_held_seconds)"},
                    "s",
                ),
                Panel(
                    "NATS",
                    "Events not sent or not handled, and connections restored",
                    {
                        "dropped, {{pdmesh_reason}}": or_zero(
                            rate("pdmesh_bus_dropped_total", "pdmesh_reason")
                        ),
                        "reconnects": rate("pdmesh_bus_reconnects_total"),
                    },
                ),
                Panel(
                    "Memory of processes",
                    "Resident",
                    {"{{instance}}": 'topk(12, process_resident_memory_bytes{job="pdmesh"})'},
                    "bytes",
                ),
            ),
        ),
    ),
)

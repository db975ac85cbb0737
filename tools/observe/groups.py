"""The dashboard of groups: their instances, the leader's changes, and the effect of their ratio."""

from __future__ import annotations

from typing import Final

from tools.observe.dashboard import Dashboard, Panel, Row, Variable
from tools.observe.queries import INTERVAL, rate

_G: Final = 'group=~"$group"'
_NO_GROUPS: Final = "without groups (docs/groups.md)"

GROUPS: Final = Dashboard(
    "pdmesh-groups",
    "pdmesh / Groups and ratio",
    "Are the groups complete, what does the leader change, and what is their ratio worth",
    (
        Row(
            "Are the groups complete?",
            (
                Panel(
                    "State",
                    "One state for each group; serving is the good one",
                    {
                        "{{group}} {{state}}": (
                            f"max by (group, state) (pdmesh_group_state{{{_G}}}) == 1"
                        )
                    },
                    kind="table",
                    empty_when=_NO_GROUPS,
                ),
                Panel(
                    "Desired instances",
                    "By group and role",
                    {"{{group}} {{role}}": (f"max by (group, role) (pdmesh_group_wanted{{{_G}}})")},
                    empty_when=_NO_GROUPS,
                ),
                Panel(
                    "Usable instances",
                    "By scenario and role: n_p and n_d",
                    {
                        "{{scenario}} {{role}}": (
                            "max by (scenario, role) (pdmesh_scenario_instances)"
                        )
                    },
                ),
            ),
        ),
        Row(
            "What does the leader change?",
            (
                Panel(
                    "Steps of groups",
                    "assigned, loaded, ...: see docs/events.md",
                    {"{{step}}": "sum by (step) (increase(pdmesh_group_steps_total[5m]))"},
                    empty_when=_NO_GROUPS,
                ),
                Panel(
                    "Steps of upgrades",
                    "turned_back: an upgrade was rolled back",
                    {"{{step}}": "sum by (step) (increase(pdmesh_upgrade_steps_total[5m]))"},
                    empty_when="until something is upgraded",
                ),
                Panel(
                    "Rounds without a decision",
                    "By reason: the leader's view is not current, or it cannot read the state",
                    {
                        "{{pdmesh_reason}}": rate(
                            "pdmesh_group_rounds_skipped_total", "pdmesh_reason"
                        )
                    },
                    empty_when="while the leader sees all",
                ),
                Panel(
                    "Elections",
                    "In an hour, over all masters; more than one a day without a restart: see NATS",
                    {"elections": "sum(increase(pdmesh_leader_elections_total[1h]))"},
                ),
            ),
        ),
        Row(
            "What is the ratio worth?",
            (
                Panel(
                    "T_p / (T_p + T_d)",
                    "Share of the prefill phase; the ratio follows it",
                    {"{{scenario}}": "max by (scenario) (pdmesh_scenario_t_p_share)"},
                    "percentunit",
                ),
                Panel(
                    "Phi",
                    "Requests/s per instance; the ratio loop raises it",
                    {"{{scenario}}": "max by (scenario) (pdmesh_scenario_phi)"},
                    "reqps",
                ),
                Panel(
                    "Instances in use",
                    "Mean number, by service, scenario and pool: the rate of instance time",
                    {
                        "{{service}} {{scenario}} {{pool}}": (
                            "sum by (service, scenario, pool) "
                            f"(rate(pdmesh_usage_instance_time_seconds_total{INTERVAL}))"
                        )
                    },
                ),
            ),
        ),
    ),
    (Variable("group", "pdmesh_group_wanted", "group"),),
)

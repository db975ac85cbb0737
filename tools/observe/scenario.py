"""The dashboard of one scenario: its objective, the phases that take its time, and what limits
it.
"""

from __future__ import annotations

from typing import Final

from tools.observe.dashboard import Dashboard, Panel, Row, Variable
from tools.observe.queries import rate

_S: Final = 'scenario=~"$scenario"'
_PS: Final = 'pdmesh_scenario=~"$scenario"'


def _of_scenario(metric: str, by: str = "scenario") -> str:
    """The highest value over all masters.

    All masters export the metric, but one that started later may have seen fewer requests.
    """
    return f"max by ({by}) ({metric}{{{_S}}})"


SCENARIO: Final = Dashboard(
    "pdmesh-scenario",
    "pdmesh / Scenario",
    "Does a scenario keep its objective, and which phase takes its time (S138)",
    (
        Row(
            "Does it keep its objective?",
            (
                Panel(
                    "TTFT objective",
                    "Calls whose first token came in time, and too late",
                    {
                        "{{pdmesh_scenario}}, {{pdmesh_outcome}}": rate(
                            "pdmesh_slo_ttft_total", "pdmesh_scenario, pdmesh_outcome", _PS
                        )
                    },
                    "reqps",
                ),
                Panel(
                    "Error budget burnt",
                    "1: at this rate 99% of calls just keep their TTFT; an alert fires at 14.4",
                    {
                        "{{pdmesh_scenario}}, 5 min": f"pdmesh:ttft_missed:ratio5m{{{_PS}}} / 0.01",
                        "{{pdmesh_scenario}}, 1 h": f"pdmesh:ttft_missed:ratio1h{{{_PS}}} / 0.01",
                    },
                ),
                Panel(
                    "Waiting for a prefill",
                    "At all gateways",
                    {"{{scenario}}": _of_scenario("pdmesh_scenario_waiting")},
                    empty_when="while no request waits",
                ),
            ),
        ),
        Row(
            "Where does its time go?",
            (
                Panel(
                    "Phases",
                    "Means of recent requests: wait, T_p, wait for a decode, xi (the KV transfer),"
                    " T_d without xi",
                    {
                        "{{scenario}} wait": _of_scenario("pdmesh_scenario_queue_seconds"),
                        "{{scenario}} T_p": _of_scenario("pdmesh_scenario_t_p_seconds"),
                        "{{scenario}} wait for decode": _of_scenario(
                            "pdmesh_scenario_decode_queue_seconds"
                        ),
                        "{{scenario}} xi": _of_scenario("pdmesh_scenario_xi_seconds"),
                        "{{scenario}} T_d": _of_scenario("pdmesh_scenario_t_d_seconds")
                        + " - "
                        + _of_scenario("pdmesh_scenario_xi_seconds"),
                    },
                    "s",
                    is_stacked=True,
                ),
                Panel(
                    "Time per token",
                    "TPOT after the first token, without the KV transfer",
                    {"{{scenario}}": _of_scenario("pdmesh_scenario_tpot_seconds")},
                    "s",
                ),
                Panel(
                    "Prompt tokens found in a cache",
                    "Share; a fall means longer prefills",
                    {"{{scenario}}": _of_scenario("pdmesh_scenario_hit_share")},
                    "percentunit",
                ),
            ),
        ),
        Row(
            "What bounds it?",
            (
                Panel(
                    "The three rates",
                    "Arrivals, and what prefills and decodes can take; the lowest bounds Phi",
                    {
                        "{{scenario}} {{term}}": _of_scenario(
                            "pdmesh_scenario_rate", "scenario, term"
                        )
                    },
                    "reqps",
                ),
                Panel(
                    "Phi",
                    "Requests/s per instance",
                    {"{{scenario}}": _of_scenario("pdmesh_scenario_phi")},
                    "reqps",
                ),
                Panel(
                    "Slots by role",
                    "Requests that the usable instances take at once",
                    {
                        "{{scenario}} {{role}}": _of_scenario(
                            "pdmesh_scenario_slots", "scenario, role"
                        )
                    },
                ),
                Panel(
                    "What chose the scenario",
                    "A client's label, a rule, the model, or the default",
                    {"{{by}}": rate("pdmesh_scenario_chosen_total", "by")},
                    "reqps",
                ),
                Panel(
                    "Error of predicted prefill times",
                    "Relative, by kind of instance; placement relies on it",
                    {"{{kind}}": "max by (kind) (pdmesh_plan_prediction_error)"},
                    "percentunit",
                ),
                Panel(
                    "Proposed tokens accepted",
                    "Share, where decodes speculate",
                    {
                        "{{pdmesh_scenario}}": rate(
                            "pdmesh_speculation_tokens_total",
                            "pdmesh_scenario",
                            f'{_PS}, pdmesh_outcome="accepted"',
                        )
                        + " / "
                        + rate("pdmesh_speculation_tokens_total", "pdmesh_scenario", _PS)
                    },
                    "percentunit",
                    empty_when="without speculation (docs/speculation.md)",
                ),
            ),
        ),
    ),
    (Variable("scenario", "pdmesh_scenario_phi", "scenario"),),
)

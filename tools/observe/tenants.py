"""The dashboard of tenants: who uses the mesh, and who is refused."""

from __future__ import annotations

from typing import Final

from tools.observe.dashboard import Dashboard, Panel, Row, Variable
from tools.observe.queries import rate

_T: Final = 'pdmesh_tenant=~"$tenant"'

TENANTS: Final = Dashboard(
    "pdmesh-tenants",
    "pdmesh / Tenants",
    "Who uses the mesh, and who is refused",
    (
        Row(
            "Who uses it?",
            (
                Panel(
                    "Tokens by tenant",
                    "Of finished calls, per second",
                    {"{{pdmesh_tenant}}": rate("pdmesh_tenant_tokens_total", "pdmesh_tenant", _T)},
                    empty_when="without API keys",
                ),
                Panel(
                    "Tokens in 24 hours",
                    "The ten largest",
                    {
                        "{{pdmesh_tenant}}": "topk(10, sum by (pdmesh_tenant) "
                        f"(increase(pdmesh_tenant_tokens_total{{{_T}}}[24h])))"
                    },
                    kind="table",
                    empty_when="without API keys",
                ),
                Panel(
                    "Open calls",
                    "And connections, at all gateways",
                    {
                        "calls": "sum(pdmesh_requests_in_flight)",
                        "connections": "sum(pdmesh_gateway_connections)",
                    },
                ),
            ),
        ),
        Row(
            "Who is refused?",
            (
                Panel(
                    "Refused, by tenant and reason",
                    "Beyond a tenant's limits, or tenant disabled; no name: no valid key or token",
                    {
                        "{{pdmesh_tenant}} {{pdmesh_reason}}": rate(
                            "pdmesh_gateway_refused_total", "pdmesh_tenant, pdmesh_reason", _T
                        )
                    },
                    "reqps",
                    empty_when="while no call is refused",
                ),
                Panel(
                    "Time in the waiting room",
                    "95th percentile, by how it ended: called, left, evicted",
                    {
                        "{{pdmesh_outcome}}": "histogram_quantile(0.95, "
                        + rate("pdmesh_gateway_wait_duration_seconds_bucket", "le, pdmesh_outcome")
                        + ")"
                    },
                    "s",
                    empty_when="while no request waits",
                ),
                Panel(
                    "Connections refused",
                    "Too many from one address, or in total",
                    {"refused": rate("pdmesh_gateway_connections_refused_total")},
                ),
            ),
        ),
    ),
    (Variable("tenant", "pdmesh_tenant_tokens_total", "pdmesh_tenant"),),
)

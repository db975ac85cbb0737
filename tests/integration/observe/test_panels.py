"""Lets a real Prometheus scrape a mesh under load. Every panel of the dashboards must have data,
and the code's list of instruments must have every series.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdmesh import api_keys
from pdmesh.api_keys import KeyFile
from pdmesh.core.tenancy.tenant import TenantEntry
from tests.fakes.lora_adapters import write_adapter
from tests.support.observe.prometheus import PrometheusServer, scraping
from tests.support.observe.promql import plain
from tests.support.waiting import until
from tools.instruments import all_instruments
from tools.observe.dashboard import Panel
from tools.observe.dashboards import DASHBOARDS

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

# The few slots make requests wait for a prefill and for a decode. The few blocks make KV move to
# the host pool.
GROUPS = """
services:
  sim:
    options: {num_slots: 4, num_kv_blocks: 96, kv_host_pool_bytes: 4194304, sim_law: smollm2-cpu,
      enable_lora: true}
    role_options: {prefill: {num_slots: 1}}
scenarios:
  chat: {service: sim, slo: {ttft_s: 20}}
groups:
  chat: {scenario: chat, prefill: 2, decode: 2}
"""
# The load of this test causes no data for these panels. Each of them explains when it is empty.
MAY_BE_EMPTY = {
    ("pdmesh-overview", "Why calls fail"),
    ("pdmesh-overview", "Instances with a fault"),
    ("pdmesh-scenario", "Proposed tokens accepted"),
    ("pdmesh-instance", "Time of steps, by part"),
    ("pdmesh-kv", "Pulls that failed"),
    ("pdmesh-kv", "Faults of tiers"),
    ("pdmesh-groups", "Steps of upgrades"),
    ("pdmesh-groups", "Rounds without a decision"),
}
# Dashboards and scalers that were made for vLLM send these queries.
_OF_VLLM = (
    "histogram_quantile(0.95, sum by (le) (rate(vllm:e2e_request_latency_seconds_bucket{M}[20s])))",
    "histogram_quantile(0.95, sum by (le) (rate(vllm:time_to_first_token_seconds_bucket{M}[20s])))",
    "rate(vllm:request_time_per_output_token_seconds_sum{M}[20s])",
    "rate(vllm:request_time_per_output_token_seconds_count{M}[20s])",
    "rate(vllm:prompt_tokens_total{M}[20s])",
    "rate(vllm:generation_tokens_total{M}[20s])",
    "rate(vllm:prefix_cache_hits_total{M}[20s]) / rate(vllm:prefix_cache_queries_total{M}[20s])",
    "sum by (finished_reason) (increase(vllm:request_success_total{M}[20s]))",
    "sum(vllm:num_requests_running{M})",
    "sum(vllm:num_requests_waiting)",
    "avg(vllm:kv_cache_usage_perc{M}) > 0",
)
OF_VLLM = tuple(query.replace("M", 'model_name="sim"') for query in _OF_VLLM)
ADAPTER = "sql"
_ORDER = random.Random(1)
PROMPTS = [[_ORDER.randrange(3, 600) for _ in range(_ORDER.randrange(200, 900))] for _ in range(40)]
WITHIN_S = 300.0  # long enough for a slow and busy machine
RATE = "20s"  # long enough for several scrapes of this test's Prometheus


@dataclass(frozen=True, slots=True)
class UpMesh:
    url: str
    keys: dict[str, str]
    targets: dict[str, str]
    pids: dict[str, int]


def pdmesh(*arguments: str) -> str:
    command = [sys.executable, "-m", "pdmesh.cli.app", *arguments]
    environment = os.environ | {"PDMESH_VLLM_METRIC_NAMES": "true"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def add_adapter_and_pin(folder: Path, state: tuple[str, str], key: str) -> None:
    write_adapter(folder / "adapter", seed=1)
    pdmesh("adapters", "add", ADAPTER, "--path", str(folder / "adapter"), *state)
    (folder / "pinned.txt").write_text(" ".join(map(str, PROMPTS[0])))
    pdmesh(
        *("pins", "add", "pinned", "--token-ids", str(folder / "pinned.txt"), *state),
        *("--tenant", "patient", "--model", "sim", "--api-key", key),
    )


@contextmanager
def up(folder: Path) -> Iterator[UpMesh]:
    """Run `pdmesh up` with groups of blank instances, two masters and API keys."""
    file = KeyFile(tenants={"patient": TenantEntry(), "eager": TenantEntry(max_concurrent=1)})
    keys = {tenant: api_keys.issue(file, tenant) for tenant in file.tenants}
    api_keys.save(folder / "keys.json", file)
    (folder / "groups.yaml").write_text(GROUPS)
    state = ("--state-dir", str(folder / "mesh"))
    pdmesh(
        *("up", "--engine", "sim", "--detach", *state, "--timeout", "180"),
        *("--groups", str(folder / "groups.yaml"), "--blank", "4", "--masters", "2"),
        "--node-agent",
        *("--keys", str(folder / "keys.json"), "--http-port", "0", "--grpc-port", "0"),
    )
    try:
        mesh = json.loads(pdmesh("status", "--json", *state))["mesh"]
        processes: dict[str, Any] = mesh["processes"]
        targets = {n: p["ops_address"] for n, p in processes.items() if p["ops_address"]}
        add_adapter_and_pin(folder, state, keys["patient"])
        pids = {name: process["pid"] for name, process in processes.items()}
        yield UpMesh(mesh["http_url"], keys, targets, pids)
    finally:
        pdmesh("down", *state)


@asynccontextmanager
async def load(mesh: UpMesh) -> AsyncIterator[None]:
    """Sixteen users of the tenant `patient` share eight slots, and one of them uses an adapter. The
    tenant `eager` exceeds its limit.
    """

    async def user(client: httpx.AsyncClient, tenant: str, seed: int) -> None:
        choice = random.Random(seed)
        headers = {"authorization": f"Bearer {mesh.keys[tenant]}"}
        while True:
            body = {
                "model": "sim" if seed else ADAPTER,
                "scenario": "chat",
                "prompt": choice.choice(PROMPTS),
                "max_tokens": choice.randrange(4, 24),
                "ignore_eos": True,
            }
            await client.post(f"{mesh.url}/v1/completions", json=body, headers=headers)

    async with httpx.AsyncClient(timeout=120) as client:
        tenants = ["patient"] * 16 + ["eager"] * 3
        users = [asyncio.create_task(user(client, t, n)) for n, t in enumerate(tenants)]
        try:
            yield
        finally:
            for each in users:
                each.cancel()
            await asyncio.gather(*users, return_exceptions=True)


def answers(server: PrometheusServer, query: str) -> bool:
    """Whether the query returns a finite number."""
    return any(math.isfinite(value) for _, value in server.query(query))


def has_data(server: PrometheusServer, panel: Panel) -> bool:
    return all(answers(server, plain(q, rate_interval=RATE)) for q in panel.queries.values())


def is_raised(server: PrometheusServer, alert: str, of: str) -> bool:
    """Whether Prometheus lists the alert as pending or firing for this tenant or process."""
    found = [each["labels"] for each in server.alerts()]
    whose = [
        a.get("pdmesh_tenant", a.get("instance", "")) for a in found if a["alertname"] == alert
    ]
    return of in whose


def unknown_series(server: PrometheusServer) -> list[str]:
    """The mesh's series with a name or a label that no instrument in the code has."""
    known = {name: each for each in all_instruments().values() for name in each.series}
    of_targets = {"__name__", "instance", "job", "le"}
    return [
        json.dumps(labels)
        for labels in server.series('{__name__=~"(pdmesh|gen_ai)_.*", job="pdmesh"}')
        if (found := known.get(labels["__name__"])) is None
        or not set(labels) <= of_targets | set(found.labels)
    ]


@contextmanager
def frozen(pids: Iterable[int]) -> Iterator[None]:
    """Stop the processes for a while. They neither answer nor exit, so their supervisor does not
    replace them.
    """
    pids = list(pids)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


@pytest.mark.req("S138", "S139")
async def test_every_panel_has_data_from_a_mesh_under_load(tmp_path: Path) -> None:
    """The test also raises alerts. A tenant exceeds its limit, and then both masters freeze."""
    panels = [(dashboard.uid, panel) for dashboard in DASHBOARDS for panel in dashboard.panels]
    awaited = {(uid, p.title): p for uid, p in panels if (uid, p.title) not in MAY_BE_EMPTY}
    assert {(uid, p.title) for uid, p in panels if p.empty_when} >= MAY_BE_EMPTY
    with up(tmp_path) as mesh, scraping(mesh.targets, tmp_path, free_port()) as server:
        async with load(mesh):

            async def all_seen() -> bool:
                for where, panel in list(awaited.items()):
                    if await asyncio.to_thread(has_data, server, panel):
                        del awaited[where]
                await asyncio.sleep(0)
                return not awaited

            try:
                await until(all_seen, WITHIN_S)
            except AssertionError:
                pytest.fail(f"without data: {sorted(awaited)}")
            await until(
                partial(asyncio.to_thread, is_raised, server, "PdmeshTenantRefused", "eager")
            )
            assert not is_raised(server, "PdmeshTenantRefused", "patient")
            for query in OF_VLLM:
                await until(partial(asyncio.to_thread, answers, server, query))
        assert unknown_series(server) == []
        assert all(value == 1 for _, value in server.query('up{job="pdmesh"}'))
        critical = [a for a in server.alerts() if a["labels"]["severity"] == "critical"]
        assert [a["labels"]["alertname"] for a in critical if a["state"] == "firing"] == []
        masters = [name for name in mesh.pids if name.startswith("master-scheduler")]
        assert len(masters) == 2
        with frozen(mesh.pids[name] for name in masters):
            for alert, of in (
                ("PdmeshNoLeader", ""),
                ("PdmeshNoInstance", ""),
                *(("PdmeshProcessDown", name) for name in masters),
            ):
                await until(partial(asyncio.to_thread, is_raised, server, alert, of))

"""Links between prefill and decode that are slow, dead, or cut within a message.

The mesh has two prefills and two decodes on the simulated engine, as processes. In most tests, the
output of prefill-0 is slow or cut. KV is large enough for many parts, and a slow link delays each
part.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from pdmesh.engine.sim.model import SimParams
from pdmesh.launcher.mesh import Mesh
from pdmesh.launcher.spec import MeshSpec
from tests.support.sites import fleet
from tests.support.streams import StreamOutcome, stream_completion
from tests.support.waiting import until
from tests.support.watch import Watch

pytestmark = pytest.mark.timeout(180)

NUM_STREAMS, MAX_TOKENS, NUM_LAYERS = 8, 8, 16
# so few streams that a prompt is computed much faster than the slow link transfers its KV
FEW_STREAMS = 3
FAULT_S = 3.0  # how much longer than without the fault a client may wait
# The most rounds until a slow link is detected. This takes three slow pulls in a row, and begins
# when computing times can be predicted.
MAX_ROUNDS = 16
TOKEN_BYTES = 512
PARAMS = SimParams(num_layers=NUM_LAYERS, token_bytes=TOKEN_BYTES)
KV = {
    "PDMESH_SIM_NUM_LAYERS": str(NUM_LAYERS),
    "PDMESH_SIM_TOKEN_BYTES": str(TOKEN_BYTES),
    "PDMESH_KV_TRANSFER": "per_layer",
}


def spec_with(failpoint: str) -> MeshSpec:
    return fleet.two_by_two({"prefill-0": {"PDMESH_PREFILL_FAILPOINT": failpoint}}, **KV)


def one_pair(service_env: dict[str, dict[str, str]], **env: str) -> MeshSpec:
    return replace(fleet.two_by_two(service_env, **KV | env), num_prefill=1, num_decode=1)


async def stream_all(
    mesh: Mesh, reference: fleet.Reference, seed: int, num_streams: int = NUM_STREAMS
) -> list[StreamOutcome]:
    """Stream prompts without a common prefix at the same time. Each must get its text."""
    rng = random.Random(seed)
    prompts = [
        [rng.randrange(40, 120) for _ in range(rng.randrange(600, 1200))]
        for _ in range(num_streams)
    ]
    async with httpx.AsyncClient(timeout=60) as client:
        outcomes = await asyncio.gather(
            *(
                stream_completion(client, mesh.http_url, prompt, MAX_TOKENS, ignore_eos=True)
                for prompt in prompts
            )
        )
    for prompt, outcome in zip(prompts, outcomes, strict=True):
        assert outcome.is_complete, outcome
        assert outcome.text == reference.text(prompt, MAX_TOKENS)
    return outcomes


def longest_gap_s(outcomes: Iterable[StreamOutcome]) -> float:
    return max(outcome.longest_gap_s for outcome in outcomes)


def counted(mesh: Mesh, name: str) -> float:
    decodes = [fleet.samples(mesh, name) for name in mesh.names if name.startswith("decode")]
    return sum(value for found in decodes for n, _, value in found if n == name)


async def stream_until_known(watch: Watch, reference: fleet.Reference) -> None:
    """Run rounds of streams until a decode avoids prefill-0."""
    seeds = iter(range(24, 24 + MAX_ROUNDS))
    while not watch.excluded():
        before = len(watch.finished)
        await stream_all(watch.mesh, reference, next(seeds), FEW_STREAMS)
        await until(lambda num=before + FEW_STREAMS: len(watch.finished) == num)
    assert {(prefill, fault) for _, prefill, fault in watch.excluded()} == {
        ("prefill-0", "KV_SLOW")
    }


@pytest.mark.fault("F24")
async def test_a_slow_link_only_delays_its_own_requests_until_it_is_avoided(tmp_path: Path) -> None:
    reference = fleet.Reference.load(tmp_path / "model", PARAMS)
    async with (
        Mesh(spec_with("prefill.link=slow"), tmp_path / "mesh") as mesh,
        Watch(mesh).on() as watch,
    ):
        await stream_until_known(watch, reference)
        avoiding = {decode for decode, _, _ in watch.excluded()}
        slow, good = (
            [e.kv_transfer_ms for e in watch.finished if e.prefill_id == prefill]
            for prefill in ("prefill-0", "prefill-1")
        )
        assert min(slow) > 1e3, "the link is not slow"
        assert statistics.median(good) < statistics.median(slow), "the good link waited too"
        del watch.finished[:]
        await stream_all(mesh, reference, 124, FEW_STREAMS)
        await until(lambda: len(watch.finished) == FEW_STREAMS)
        pairs = {(e.prefill_id, e.decode_id) for e in watch.finished}
        assert not pairs & {("prefill-0", decode) for decode in avoiding}
        assert counted(mesh, "pdmesh_kv_transfer_failures_total") == 0, (
            "a slow pull does not count as a failure"
        )
        await fleet.until_nothing_held(mesh, 14.0)


@pytest.mark.fault("F24")
async def test_if_the_only_link_is_slow_no_kv_moves_for_a_while(
    tmp_path: Path,
) -> None:
    """With one prefill and one decode, each serves requests alone once the link is known to be
    slow. No request waits for KV.
    """
    reference = fleet.Reference.load(tmp_path / "model", PARAMS)
    spec = one_pair({"prefill-0": {"PDMESH_PREFILL_FAILPOINT": "prefill.link=slow"}})
    async with Mesh(spec, tmp_path / "mesh") as mesh, Watch(mesh).on() as watch:
        await stream_until_known(watch, reference)
        del watch.finished[:]
        await stream_all(mesh, reference, 124, FEW_STREAMS)
        await until(lambda: len(watch.finished) == FEW_STREAMS)
        assert all(e.prefill_id == e.decode_id for e in watch.finished)
        assert not any(e.kv_transfer_ms for e in watch.finished)


@pytest.mark.fault("F25")
@pytest.mark.parametrize("part", [1, 5, 8])
async def test_a_link_cut_within_a_part_fails_no_request(tmp_path: Path, part: int) -> None:
    """A part of the KV is announced, but its bytes never arrive.

    Then the connection works again.
    """
    reference = fleet.Reference.load(tmp_path / "model", PARAMS)
    async with Mesh(spec_with(f"prefill.sending=cut@{part}"), tmp_path / "mesh") as mesh:
        outcomes = await stream_all(mesh, reference, seed=part)
        assert counted(mesh, "pdmesh_kv_transfer_failures_total") >= 1, "the cut was not hit"
        in_peace = await stream_all(mesh, reference, seed=100 + part)
        assert longest_gap_s(outcomes) <= FAULT_S + 2 * longest_gap_s(in_peace)
        await fleet.until_nothing_held(mesh, 14.0)


@pytest.mark.fault("F23", "F24")
@pytest.mark.parametrize("mode", ["whole", "per_layer"])
async def test_if_the_only_link_is_dead_a_decode_computes_the_prompt_itself(
    tmp_path: Path, mode: str
) -> None:
    """The mesh has one prefill and one decode. No request for KV reaches the prefill.

    The first requests detect this, and the next requests do not try to get KV.
    """
    reference = fleet.Reference.load(tmp_path / "model", PARAMS)
    spec = one_pair({}, PDMESH_KV_TRANSFER=mode)
    async with Mesh(spec, tmp_path / "mesh") as mesh, Watch(mesh).on() as watch:
        # A mesh whose link is dead from the beginning never becomes ready.
        await fleet.arm(mesh, "decode-0", "decode.asking=drop", stays=True)
        outcomes = await stream_all(mesh, reference, seed=23)
        await until(lambda: watch.excluded() == {("decode-0", "prefill-0", "KV_UNREACHABLE")})
        failures = counted(mesh, "pdmesh_kv_transfer_failures_total")
        in_peace = await stream_all(mesh, reference, seed=123)
        # In the round of `outcomes`, one instance computes what two share in the round `in_peace`.
        assert longest_gap_s(outcomes) <= FAULT_S + 4 * longest_gap_s(in_peace)
        assert counted(mesh, "pdmesh_kv_transfer_failures_total") == failures, (
            "no instance tried to pull"
        )
        await until(lambda: len(watch.finished) == 2 * NUM_STREAMS)
        assert all(event.num_migrations <= 1 for event in watch.finished)
        assert all(event.num_migrations == 0 for event in watch.finished[NUM_STREAMS:])

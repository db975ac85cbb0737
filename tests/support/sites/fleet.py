"""Meshes on the simulated engine for tests, their expected answers, and checks for leaks.

After each request, the counts of slots, tickets and bytes held must return to zero (I4, I6).
"""

from __future__ import annotations

import asyncio
import random
import re
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc
import httpx
from tokenizers import Tokenizer

from pdmesh.engine.base import Sampling
from pdmesh.engine.sim.model import SimParams
from pdmesh.engine.sim_tokenizer import write_sim_model
from pdmesh.launcher.mesh import Mesh
from pdmesh.launcher.spec import MeshSpec
from pdmesh.net.grpc import rpc
from pdmesh.net.nats.bus import NatsBus
from pdmesh.net.nats.registry import NatsRegistry
from pdmesh.telemetry import names
from pdmesh.v1.instance_service_pb2 import GetStatusRequest, GetStatusResponse
from pdmesh.v1.instance_service_pb2_grpc import InstanceServiceStub
from tests.support.sim_reference import sim_reference
from tests.support.streams import stream_completion
from tests.support.waiting import until

# The metrics of the mesh as /metrics names them, without the suffixes for unit and kind.
_METRICS = tuple(
    value.replace(".", "_")
    for value in vars(names).values()
    if isinstance(value, str) and value.startswith(("pdmesh.", "gen_ai."))
)
INSTANCES = ("prefill-0", "prefill-1", "decode-0", "decode-1")

# One instance of each role has room for all streams. So no instance rejects a request, and a test
# sees only the effects of its own fault.
_ENV = {"PDMESH_PREFILL_NUM_SLOTS": "48", "PDMESH_DECODE_NUM_SLOTS": "48"}


def two_by_two(service_env: Mapping[str, Mapping[str, str]] | None = None, **env: str) -> MeshSpec:
    return MeshSpec(
        engine="sim",
        num_prefill=2,
        num_decode=2,
        http_port=0,
        grpc_port=0,
        env={**_ENV, **env},
        service_env=service_env or {},
        start_timeout_s=180,
    )


def one_by_one(**env: str) -> MeshSpec:
    """A mesh of one prefill and one decode with the default timeouts, unless `env` changes them."""
    return MeshSpec(
        engine="sim",
        num_prefill=1,
        num_decode=1,
        http_port=0,
        grpc_port=0,
        env=env,
        start_timeout_s=180,
    )


@dataclass(frozen=True)
class Reference:
    """The simulated model's answers, computed in this process without a mesh."""

    tokenizer: Tokenizer
    params: SimParams = field(default_factory=SimParams)

    @classmethod
    def load(cls, directory: Path, params: SimParams = SimParams()) -> Reference:  # noqa: B008
        write_sim_model(directory)
        return cls(Tokenizer.from_file(str(directory / "tokenizer.json")), params)

    def text(self, prompt: list[int], max_tokens: int) -> str:
        """The greedy answer of `max_tokens` tokens, which ignores end-of-text.

        An incomplete character at the end is not part of the text.
        """
        sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
        tokens, _ = sim_reference(prompt, sampling, self.params)
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True)).rstrip("\ufffd")


@dataclass(frozen=True)
class Streams:
    """Streams of random prompts, each of which must get its whole text.

    The lengths of the prompts lie in the range `lengths`.
    """

    client: httpx.AsyncClient
    mesh: Mesh
    reference: Reference
    rng: random.Random
    lengths: tuple[int, int]

    async def longest_gap_s(self, num_streams: int, max_tokens: int) -> float:
        """Run `num_streams` streams at once, and return the longest silence in any of them.

        The time until the first token counts as silence.
        """
        prompts = [
            [self.rng.randrange(40, 120) for _ in range(self.rng.randrange(*self.lengths))]
            for _ in range(num_streams)
        ]
        url = self.mesh.http_url
        outcomes = await asyncio.gather(
            *(
                stream_completion(self.client, url, prompt, max_tokens, ignore_eos=True)
                for prompt in prompts
            )
        )
        for prompt, outcome in zip(prompts, outcomes, strict=True):
            assert outcome.is_complete, outcome
            assert outcome.text == self.reference.text(prompt, max_tokens)
        return max(outcome.longest_gap_s for outcome in outcomes)


async def arm(mesh: Mesh, name: str, failpoint: str, *, stays: bool = False) -> int:
    """Restart a process with a failpoint, wait until all processes are ready, and return its pid.

    A failpoint makes the process fail at a named place. When it dies there, its successor has no
    failpoint, unless `stays` is true.
    """
    process = mesh.supervisor.specs[name]
    setting = f"PDMESH_{process.service.replace('-', '_').upper()}_FAILPOINT"
    env = {**process.env, setting: failpoint}
    await mesh.supervisor.stop(name)
    mesh.supervisor.start(replace(process, env=env))
    if not stays:
        del env[setting]  # the process has already got a copy
    await mesh.wait_ready(timeout_s=180)
    return mesh.pid(name)


async def status(address: str) -> GetStatusResponse | None:
    async with rpc.channel(address) as channel:
        try:
            return await InstanceServiceStub(channel).GetStatus(GetStatusRequest(), timeout=30)
        except grpc.aio.AioRpcError:
            return None


async def addresses(mesh: Mesh) -> dict[str, str]:
    """The gRPC address of each registered instance."""
    bus = await NatsBus.connect(mesh.nats_url, "chaos-test")
    try:
        view = await NatsRegistry(bus, 3.0).watch()
        try:
            return {i: r.grpc_address for i, r in view.records.items() if i in INSTANCES}
        finally:
            await view.close()
    finally:
        await bus.close()


async def held(mesh: Mesh) -> dict[str, str]:
    """The resources that instances still hold for requests, or "no answer", by instance. Empty if
    all are free.
    """
    found: dict[str, str] = {}
    known = await addresses(mesh)
    for name in (n for n in INSTANCES if n in mesh.names):
        answer = await status(known[name]) if name in known else None
        if answer is None:
            found[name] = "no answer"
            continue
        if rest := held_of(answer):
            found[name] = rest
    return found


def held_of(answer: GetStatusResponse) -> str:
    """The resources that an instance holds for requests. Empty if it holds nothing."""
    numbers = {
        "slots": answer.load.num_slots_used,
        "running": answer.num_running,
        "tickets": answer.num_tickets,
        "staging_bytes": answer.staging_bytes_used,
        "retrieving": answer.num_retrieving,
    }
    rest = {k: v for k, v in numbers.items() if v}
    return str(rest) if rest else ""


async def until_nothing_held(mesh: Mesh, within_s: float) -> None:
    """Wait until the instances hold nothing for requests. Otherwise fails and names the rest."""
    last: dict[str, str] = {}

    async def is_free() -> bool:
        last.clear()
        last.update(await held(mesh))
        return not last

    try:
        await until(is_free, within_s)
    except AssertionError as exc:
        raise AssertionError(f"held after {within_s} s: {last}") from exc


_SAMPLE = re.compile(r"^(?P<name>[a-z_:]+)(?:\{(?P<labels>[^}]*)\})? (?P<value>[0-9.e+-]+)$")


def counted(mesh: Mesh, processes: Iterable[str], metric: str, **labels: str) -> float:
    """The sum of a metric over processes, of the samples with these labels; 0 if there are none
    yet.

    Fails if no process can export a metric of this name, because its sum would always be 0.
    """
    assert metric.startswith(_METRICS), f"no metric is called {metric}"
    found = [sample for process in processes for sample in samples(mesh, process)]
    if not any(name == metric for name, _, _ in found):
        longer = {name for name, _, _ in found if name.startswith(f"{metric}_")}
        assert not longer, f"{metric} is exported as {longer}"
    return sum(
        value for name, has, value in found if name == metric and labels.items() <= has.items()
    )


def samples(mesh: Mesh, process: str) -> Iterator[tuple[str, Mapping[str, str], float]]:
    """The samples on the /metrics page of `process`."""
    url = f"http://{mesh.ops_address(process)}/metrics"
    with urllib.request.urlopen(url, timeout=60) as response:
        for line in response.read().decode().splitlines():
            if match := _SAMPLE.match(line):
                labels = dict(re.findall(r'(\w+)="([^"]*)"', match["labels"] or ""))
                yield match["name"], labels, float(match["value"])

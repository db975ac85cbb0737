"""The gateway's CPU per request and per token, in this tree and in another revision.

Each tree has a mesh of sim instances that runs all the time. Each round measures both meshes, in
alternating order, so that other load on the machine affects both alike. The cost of a request is
measured with answers of one token. The cost of a token is the extra cost of a longer, streamed
answer, divided by the number of its tokens after the first.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from loadtests.harness.client import LoadSpec
from loadtests.harness.generator import ROOT, measure
from loadtests.harness.mesh import instance_settings
from loadtests.harness.processes import ProcessSet
from loadtests.harness.results import Spread

_NUM_TOKENS: Final = 128
_CONCURRENCY: Final = 8
_WARMUP_S: Final = 1.0
# A program that starts the mesh with the tree's own code.
_MESH: Final = """
import asyncio, json, sys, tempfile
from pathlib import Path
from pdmesh.launcher.mesh import Mesh
from pdmesh.launcher.spec import MeshSpec

async def main():
    env = {k: {f"PDMESH_{k.upper()}_{n}": v for n, v in of.items()} for k, of in json.loads(sys.argv[1]).items()}
    spec = MeshSpec(
        engine="sim", http_port=0, grpc_port=0, service_env=env, start_timeout_s=float(sys.argv[2]),
        num_gateways=int(sys.argv[3]), **json.loads(sys.argv[4])
    )
    with tempfile.TemporaryDirectory(prefix="pdmesh-cost-") as directory:
        async with Mesh(spec, Path(directory)) as mesh:
            pids = {name: mesh.pid(name) for name in mesh.names}
            print(json.dumps({"url": mesh.http_url, "pids": pids}), flush=True)
            await asyncio.to_thread(sys.stdin.read)

asyncio.run(main())
"""  # noqa: E501  # it is not of this file's language level


@dataclass(frozen=True, slots=True)
class GatewayCost:
    """The CPU in microseconds, or the instructions in thousands."""

    per_request: float
    per_token: float


@dataclass(frozen=True, slots=True)
class Tree:
    """A running mesh. `pids` has its gateways by name, and `all_pids` has all its processes."""

    url: str
    pids: Mapping[str, int]
    all_pids: Mapping[str, int]

    def cost(self, window_s: float) -> GatewayCost:
        per_request, _ = self._cpu_us(window_s, 1, is_streamed=False)
        per_stream, num_tokens = self._cpu_us(window_s, _NUM_TOKENS, is_streamed=True)
        return GatewayCost(per_request, (per_stream - per_request) / (num_tokens - 1))

    def _cpu_us(
        self, window_s: float, max_tokens: int, *, is_streamed: bool
    ) -> tuple[float, float]:
        """The CPU time of one answer in microseconds, and the number of its tokens."""
        url = urlsplit(self.url)
        assert url.hostname is not None
        assert url.port is not None
        spec = LoadSpec(
            url.hostname,
            url.port,
            "/v1/chat/completions",
            tuple(request_body(number, max_tokens, is_streamed) for number in range(64)),
            _CONCURRENCY,
            _WARMUP_S,
            window_s,
        )
        measured = measure(spec, ProcessSet(self.pids))
        load = measured.load
        if load.errors or not load.num_requests:
            raise RuntimeError(f"{self.url}: {dict(load.errors)}")
        cpu_s = sum(s for name, s in measured.cpu_s.items() if name != "generator")
        return 1e6 * cpu_s / load.num_requests, load.num_tokens / load.num_requests


def request_body(number: int, max_tokens: int, is_streamed: bool) -> str:
    content = f"Conversation {number}: " + "what is there to see in Lisbon in spring? " * 12
    body: dict[str, Any] = {
        "model": "default",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": max_tokens,
        "temperature": 0.7,
    }
    if is_streamed:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return json.dumps(body)


@contextlib.contextmanager
def checked_out(revision: str) -> Iterator[Path]:
    """A folder with the tree of `revision`. It is removed at the end."""
    with tempfile.TemporaryDirectory(prefix="pdmesh-tree-") as directory:
        tree = Path(directory) / "tree"
        tree.mkdir()
        archive = subprocess.Popen(["git", "archive", revision], cwd=ROOT, stdout=subprocess.PIPE)
        subprocess.run(["tar", "-x", "-C", str(tree)], stdin=archive.stdout, check=True)
        if archive.wait():
            raise SystemExit(f"git archive {revision} failed")
        yield tree


@contextlib.contextmanager
def running(
    tree: Path,
    first_path: str = "",
    env: Mapping[str, str] | None = None,
    start_s: float = 180.0,
    *,
    num_gateways: int = 1,
    python: str = sys.executable,
    prefill_slots: int | None = None,
    **spec: object,
) -> Iterator[Tree]:
    """A mesh of the tree, until the `with` block ends.

    Its processes look for modules in `first_path` first. `spec` has further fields of the mesh's
    MeshSpec.
    """
    paths = [first_path, str(tree / "libs"), str(tree)]
    environment = {
        **os.environ,
        "PYTHONPATH": ":".join(filter(None, paths)),
        "PYTHONDONTWRITEBYTECODE": "1",
        **(env or {}),
    }
    settings = {role: dict(instance_settings("sim")) for role in ("prefill", "decode")}
    if prefill_slots is not None:
        settings["prefill"]["NUM_SLOTS"] = str(prefill_slots)
    process = subprocess.Popen(
        [
            python,
            "-c",
            _MESH,
            json.dumps(settings),
            str(start_s),
            str(num_gateways),
            json.dumps(spec),
        ],
        cwd=tree,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line:
            raise SystemExit(f"the mesh of {tree} did not start")
        found = json.loads(line)
        pids: Mapping[str, int] = found["pids"]
        gateways = {name: pid for name, pid in pids.items() if name.startswith("gateway")}
        yield Tree(found["url"], gateways, pids)
    finally:
        process.stdin.close()
        process.wait(60)


def ratios(old: list[float], new: list[float]) -> Spread:
    """The ratio of each round, so that a disturbance spoils only one value."""
    return Spread.of([after / before for before, after in zip(old, new, strict=True)])


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench NAME=cost ARGS=", description=__doc__)
    parser.add_argument("--old", default="HEAD~1", help="the revision to compare this tree with")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--window-s", type=float, default=4.0, help="of each load")
    parser.add_argument("--out", type=Path, help="a Markdown file for the table")
    options = parser.parse_args()
    old: list[GatewayCost] = []
    new: list[GatewayCost] = []
    with checked_out(options.old) as tree, running(tree) as before, running(ROOT) as now:
        for number in range(options.rounds):
            order = [(before, old), (now, new)]
            for side, costs in order if number % 2 == 0 else order[::-1]:
                costs.append(side.cost(options.window_s))
            print(f"round {number + 1}: old {old[-1]}, new {new[-1]}", file=sys.stderr)
    text = report("gateway CPU, us", options.old, old, new)
    print(text)
    if options.out is not None:
        options.out.write_text(text)


def report(what: str, revision: str, old: list[GatewayCost], new: list[GatewayCost]) -> str:
    lines = [
        f"| {what} | {revision} | this tree | ratio of each round |",
        "|---|---|---|---|",
    ]
    for name, before, after in (
        ("per request", [c.per_request for c in old], [c.per_request for c in new]),
        ("per token", [c.per_token for c in old], [c.per_token for c in new]),
    ):
        cells = [Spread.of(before).text(".1f"), Spread.of(after).text(".1f")]
        lines.append(f"| {name} | {' | '.join(cells)} | {ratios(before, after).text('.3f')} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()

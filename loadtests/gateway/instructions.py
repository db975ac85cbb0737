"""How many instructions the gateway executes per request and per token, here and in another
revision.

Each tree's gateway runs under Valgrind's callgrind, which counts every instruction outside the
kernel. (`cost` measures CPU time instead, which also depends on other load, caches and clock
rates.) The gateway's instances are scripted (`lone_gateway.py`). Requests are sent one at a time,
and tokens come one at a time. Otherwise a late gateway would gather several tokens into one
message, and the count would depend on other load. Requests and tokens cost the most if none are
gathered, so the counts are upper limits.

Valgrind is a package of every distribution (apt install valgrind). It slows the gateway down by a
factor of about 100.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from loadtests.gateway.cost import GatewayCost, checked_out, ratios
from loadtests.harness.generator import ROOT
from loadtests.harness.results import Spread

_PROGRAM: Final = ROOT / "loadtests" / "gateway" / "lone_gateway.py"
_NUM_TOKENS: Final = 128
_ANSWER_S: Final = 300.0
_DUMP_S: Final = 60.0
_WARMUP: Final = 64
_TOTALS: Final = re.compile(r"^totals: (\d+)$", re.MULTILINE)
_CONTENT: Final = "what is there to see in Lisbon in spring? " * 12
# For each kind of request, its path and the fields that only its bodies have.
KINDS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": _CONTENT}]},
    ),
    "completion": ("/v1/completions", {"prompt": _CONTENT}),
}


@dataclass(slots=True)
class CountedGateway:
    """The gateway of a tree. Valgrind writes its counts to the folder `out`, one file per dump."""

    url: str
    pid: int
    out: Path
    num_dumps: int = 0

    def start_counting(self, kinds: Sequence[str]) -> None:
        self._control("--instr=on")
        for kind in kinds:
            self._send(kind, _WARMUP, 1)
            self._send(kind, 2, _NUM_TOKENS)

    def cost(self, kind: str, num_requests: int, idle_s: float) -> GatewayCost:
        """The cost in thousands of instructions. The instructions of an idle gateway are
        subtracted.
        """
        num_streams = max(1, num_requests // 16)
        background = self._counted(kind, 0, 1, idle_s) / idle_s
        per_request = self._net(kind, num_requests, 1, background)
        per_stream = self._net(kind, num_streams, _NUM_TOKENS, background)
        per_token = (per_stream - per_request) / (_NUM_TOKENS - 1)
        return GatewayCost(per_request / 1e3, per_token / 1e3)

    def _net(self, kind: str, num_requests: int, max_tokens: int, background: float) -> float:
        began = time.monotonic()
        count = self._counted(kind, num_requests, max_tokens)
        return (count - background * (time.monotonic() - began)) / num_requests

    def _counted(self, kind: str, num_requests: int, max_tokens: int, idle_s: float = 0.0) -> int:
        self._control("--zero")
        self._send(kind, num_requests, max_tokens)
        time.sleep(idle_s)
        self._control("--dump")
        self.num_dumps += 1
        dump = self.out / f"counts.{self.pid}.{self.num_dumps}"
        until = time.monotonic() + _DUMP_S
        while time.monotonic() < until:
            if dump.exists() and (found := _TOTALS.search(dump.read_text())):
                return int(found[1])
            time.sleep(0.05)
        raise SystemExit(f"callgrind wrote no totals to {dump}")

    def _send(self, kind: str, num_requests: int, max_tokens: int) -> None:
        path, asked = KINDS[kind]
        body: dict[str, Any] = {"model": "default", "max_tokens": max_tokens, **asked}
        body |= {"temperature": 0.7, "ignore_eos": True}
        if max_tokens > 1:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        for _ in range(num_requests):
            self._ask(path, json.dumps(body))

    def _ask(self, path: str, body: str) -> None:
        url = urlsplit(self.url)
        assert url.hostname is not None
        connection = http.client.HTTPConnection(url.hostname, url.port, timeout=_ANSWER_S)
        connection.request("POST", path, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
        connection.close()
        if answer.status != http.client.OK:
            raise SystemExit(f"{self.url} answered {answer.status}: {text[:300]!r}")

    def _control(self, option: str) -> None:
        command = ["callgrind_control", option, str(self.pid)]
        subprocess.run(command, check=True, capture_output=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench NAME=instructions ARGS=", description=__doc__)
    parser.add_argument("--old", default="HEAD~1", help="the revision to compare this tree with")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=64, help="of one token, in each round")
    parser.add_argument("--idle-s", type=float, default=5.0, help="to count an idle gateway")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of requests")
    parser.add_argument("--out", type=Path, help="a Markdown file for the table")
    options = parser.parse_args()
    if shutil.which("callgrind_control") is None:
        raise SystemExit("this needs Valgrind: apt install valgrind")
    kinds: list[str] = options.kinds.split(",")
    old: dict[str, list[GatewayCost]] = {kind: [] for kind in kinds}
    new: dict[str, list[GatewayCost]] = {kind: [] for kind in kinds}
    with (
        checked_out(options.old) as tree,
        counted(tree, kinds) as before,
        counted(ROOT, kinds) as now,
    ):
        for number in range(options.rounds):
            for kind in kinds:
                old[kind].append(before.cost(kind, options.requests, options.idle_s))
                new[kind].append(now.cost(kind, options.requests, options.idle_s))
                print(
                    f"round {number + 1}, {kind}: old {old[kind][-1]}, new {new[kind][-1]}",
                    file=sys.stderr,
                )
    text = table(options.old, old, new)
    print(text)
    if options.out is not None:
        options.out.write_text(text)


def table(
    revision: str, old: dict[str, list[GatewayCost]], new: dict[str, list[GatewayCost]]
) -> str:
    lines = [
        f"| thousand instructions of the gateway | {revision} | this tree | ratio of each round |",
        "|---|---|---|---|",
    ]
    for kind, costs in old.items():
        for name, before, after in (
            (
                "answer of one token",
                [c.per_request for c in costs],
                [c.per_request for c in new[kind]],
            ),
            (
                "further streamed token",
                [c.per_token for c in costs],
                [c.per_token for c in new[kind]],
            ),
        ):
            cells = [Spread.of(before).text(".1f"), Spread.of(after).text(".1f")]
            cells.append(ratios(before, after).text(".3f"))
            lines.append(f"| {kind}: {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


@contextlib.contextmanager
def counted(tree: Path, kinds: Sequence[str]) -> Iterator[CountedGateway]:
    """A gateway of the tree, until the `with` block ends. Callgrind already counts."""
    with tempfile.TemporaryDirectory(prefix="pdmesh-callgrind-") as directory:
        valgrind = [
            "valgrind", "--tool=callgrind", "--instr-atstart=no", "--quiet",
            f"--callgrind-out-file={directory}/counts.%p", f"--log-file={directory}/log.%p",
        ]  # fmt: skip
        with (
            started(tree, ["mesh"]) as (records, _),
            started(tree, ["gateway", *records.split()], valgrind) as (url, pid),
        ):
            gateway = CountedGateway(url, pid, Path(directory))
            gateway.start_counting(kinds)
            yield gateway


@contextlib.contextmanager
def started(
    tree: Path, arguments: Sequence[str], wrapper: Sequence[str] = ()
) -> Iterator[tuple[str, int]]:
    """Start a program of the tree; yields the first line that it prints, and its process id."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{tree / 'libs'}:{tree}",
        "PYTHONDONTWRITEBYTECODE": "1",
        # sets have the same order in each run, so each run executes the same code
        "PYTHONHASHSEED": "0",
        "PYTHONSAFEPATH": "1",
    }
    process = subprocess.Popen(
        [*wrapper, sys.executable, str(_PROGRAM), *arguments],
        cwd=tree,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        line = process.stdout.readline().strip()
        if not line:
            raise SystemExit(f"the program of {tree} did not start: {' '.join(arguments)[:20]}")
        yield line, process.pid
    finally:
        process.stdin.close()
        process.wait(120)


if __name__ == "__main__":
    main()

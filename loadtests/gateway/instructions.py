"""How many instructions the gateway executes per request and per token, here and in another
revision.

Both trees have a mesh of sim instances whose gateway runs under Valgrind's callgrind, which counts
every instruction outside the kernel. A count hardly depends on what else the machine does, so a
difference of few percent shows on a noisy machine, too; `cost` measures CPU time instead, in which
other load, caches and clock rates have a part. What the gateway does without requests is counted
for itself and subtracted.

Valgrind is a package of every distribution (apt install valgrind). It slows the gateway down by a
factor of about 100.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from loadtests.gateway.cost import GatewayCost, Tree, checked_out, report, request_body, running
from loadtests.gateway.scenarios import CHAT_PATH
from loadtests.harness.generator import ROOT

_NUM_TOKENS: Final = 128
_ANSWER_S: Final = 300.0
_DUMP_S: Final = 60.0
_START_S: Final = 600.0
_CONCURRENCY: Final = 8
_WARMUP: Final = 64
_OUT: Final = "PDMESH_CALLGRIND_OUT"
# Python imports it at start; so it runs in every process of the mesh, and only the gateway changes.
_SITECUSTOMIZE: Final = f"""
import os, sys

if "{_OUT}" in os.environ and any(a.endswith("services.gateway") for a in sys.orig_argv):
    folder = os.environ.pop("{_OUT}")
    os.execvp("valgrind", [
        "valgrind", "--tool=callgrind", "--instr-atstart=no", "--quiet",
        f"--callgrind-out-file={{folder}}/counts.%p", f"--log-file={{folder}}/log.%p",
        *sys.orig_argv,
    ])
"""
_TOTALS: Final = re.compile(r"^totals: (\d+)$", re.MULTILINE)


@dataclass(slots=True)
class CountedGateway:
    """The gateway of a tree. Its counts are in folder `out`, a file for each dump."""

    tree: Tree
    out: Path
    num_dumps: int = 0

    def start_counting(self) -> None:
        self._send(_WARMUP, 1)
        self._send(2, _NUM_TOKENS)
        self._control("--instr=on")
        self._send(_WARMUP // 4, 1)  # callgrind translates the code anew

    def cost(self, num_requests: int, idle_s: float) -> GatewayCost:
        """Thousands of instructions, without those of an idle gateway."""
        background = self._counted(0, 1, idle_s) / idle_s
        per_request = self._net(num_requests, 1, background)
        per_stream = self._net(max(1, num_requests // 8), _NUM_TOKENS, background)
        per_token = (per_stream - per_request) / (_NUM_TOKENS - 1)
        return GatewayCost(per_request / 1e3, per_token / 1e3)

    def _net(self, num_requests: int, max_tokens: int, background: float) -> float:
        began = time.monotonic()
        count = self._counted(num_requests, max_tokens)
        return (count - background * (time.monotonic() - began)) / num_requests

    def _counted(self, num_requests: int, max_tokens: int, idle_s: float = 0.0) -> int:
        self._control("--zero")
        self._send(num_requests, max_tokens)
        time.sleep(idle_s)
        self._control("--dump")
        self.num_dumps += 1
        dump = self.out / f"counts.{self._pid}.{self.num_dumps}"
        until = time.monotonic() + _DUMP_S
        while time.monotonic() < until:
            if dump.exists() and (found := _TOTALS.search(dump.read_text())):
                return int(found[1])
            time.sleep(0.05)
        raise SystemExit(f"callgrind wrote no totals to {dump}")

    def _send(self, num_requests: int, max_tokens: int) -> None:
        with ThreadPoolExecutor(_CONCURRENCY) as pool:
            for _ in pool.map(partial(self._ask, max_tokens), range(num_requests)):
                pass

    def _ask(self, max_tokens: int, number: int) -> None:
        url = urlsplit(self.tree.url)
        assert url.hostname is not None
        connection = http.client.HTTPConnection(url.hostname, url.port, timeout=_ANSWER_S)
        body = request_body(number % 64, max_tokens, is_streamed=max_tokens > 1)
        connection.request("POST", CHAT_PATH, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
        connection.close()
        if answer.status != http.client.OK:
            raise SystemExit(f"{self.tree.url} answered {answer.status}: {text[:300]!r}")

    @property
    def _pid(self) -> int:
        (pid,) = self.tree.pids.values()
        return pid

    def _control(self, option: str) -> None:
        command = ["callgrind_control", option, str(self._pid)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench NAME=instructions ARGS=", description=__doc__)
    parser.add_argument("--old", default="HEAD~1", help="the revision to compare this tree with")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=128, help="of one token, in each round")
    parser.add_argument("--idle-s", type=float, default=10.0, help="to count an idle gateway")
    parser.add_argument("--out", type=Path, help="a Markdown file for the table")
    options = parser.parse_args()
    if shutil.which("callgrind_control") is None:
        raise SystemExit("this needs Valgrind: apt install valgrind")
    old: list[GatewayCost] = []
    new: list[GatewayCost] = []
    with checked_out(options.old) as tree, counted(tree) as before, counted(ROOT) as now:
        for number in range(options.rounds):
            for side, costs in ((before, old), (now, new)):
                costs.append(side.cost(options.requests, options.idle_s))
            print(f"round {number + 1}: old {old[-1]}, new {new[-1]}", file=sys.stderr)
    text = report("thousand instructions of the gateway", options.old, old, new)
    print(text)
    if options.out is not None:
        options.out.write_text(text)


@contextlib.contextmanager
def counted(tree: Path) -> Iterator[CountedGateway]:
    """A mesh of the tree, until the block ends. Callgrind already counts in its gateway."""
    with tempfile.TemporaryDirectory(prefix="pdmesh-callgrind-") as directory:
        folder = Path(directory)
        (folder / "sitecustomize.py").write_text(_SITECUSTOMIZE)
        # Sets and dicts of strings have one order, so every run executes the same code.
        env = {_OUT: directory, "PYTHONHASHSEED": "0"}
        with running(tree, directory, env, _START_S) as mesh:
            gateway = CountedGateway(mesh, folder)
            gateway.start_counting()
            yield gateway


if __name__ == "__main__":
    main()

"""A network of hosts for tests: network namespaces, and the switch process that connects them."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

from tests.support.hosts.switch import OUTSIDE

_ROOT = Path(__file__).parents[3]


def why_not() -> str:
    """Why this machine cannot have network namespaces as hosts. Empty if it can."""
    if os.geteuid() != 0:
        return "needs root"
    if shutil.which("ip") is None:
        return "needs iproute2"
    if not Path("/dev/net/tun").exists():
        return "needs /dev/net/tun"
    probe = subprocess.run(["unshare", "-nm", "true"], capture_output=True, check=False)
    return "" if probe.returncode == 0 else "needs network and mount namespaces"


def free_subnet() -> str:
    """The beginning of addresses that this machine does not use, for example `10.213.7.`."""
    taken = subprocess.run(["ip", "-4", "route"], capture_output=True, text=True, check=True).stdout
    while True:
        subnet = f"10.{random.randrange(200, 250)}.{random.randrange(1, 250)}."
        if not re.search(rf"\b{re.escape(subnet)}", taken):
            return subnet


@dataclass(frozen=True)
class Cable:
    """The latency and the loss in each direction between any two hosts."""

    latency_s: float = 0.002
    loss: float = 0.001


class Network:
    """Namespaces with these addresses by host, and a switch. Needs root.

    Usage: `with Network({"a": "10.213.7.11"}, "10.213.7.1", Cable()) as network:`
    """

    def __init__(self, addresses: Mapping[str, str], outside: str, cable: Cable) -> None:
        self.addresses = dict(addresses)
        self._outside, self._cable = outside, cable
        self._cleanup = contextlib.ExitStack()
        self._switch: subprocess.Popen[bytes] | None = None
        self._cut: set[frozenset[str]] = set()

    def namespace(self, host: str) -> str:
        return f"pdmesh-{os.getpid()}-{host}"

    def __enter__(self) -> Self:
        try:
            self._begin()
        except BaseException:
            self._cleanup.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    def inside(self, host: str, *command: str) -> list[str]:
        """The command that runs `command` on that host."""
        return ["ip", "netns", "exec", self.namespace(host), *command]

    def pids(self, host: str) -> list[int]:
        found = subprocess.run(
            ["ip", "netns", "pids", self.namespace(host)],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        return [int(pid) for pid in found.stdout.split()]

    def kill_all(self, host: str) -> None:
        """Send SIGKILL to every process on the host, as if its power failed."""
        while pids := self.pids(host):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def cut(self, *pairs: Iterable[str]) -> None:
        """Drop all packets between the hosts of each pair, until `heal`."""
        self._cut |= {frozenset(pair) for pair in pairs}
        self._tell()

    def isolate(self, host: str) -> None:
        self.cut(*([host, other] for other in (*self.addresses, OUTSIDE) if other != host))

    def heal(self) -> None:
        self._cut.clear()
        self._tell()

    def _begin(self) -> None:
        for host in self.addresses:
            subprocess.run(["ip", "netns", "add", self.namespace(host)], check=True)
            self._cleanup.callback(self._remove, host)
        places = {host: (self.namespace(host), ip) for host, ip in self.addresses.items()}
        places[OUTSIDE] = ("", self._outside)
        self._switch = subprocess.Popen(
            [sys.executable, "-m", "tests.support.hosts.switch"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=_ROOT,
        )  # fmt: skip
        self._cleanup.callback(self._stop_switch)
        self._say(
            {"hosts": places, "latency_s": self._cable.latency_s, "loss": self._cable.loss}, "ready"
        )

    def _remove(self, host: str) -> None:
        self.kill_all(host)
        subprocess.run(["ip", "netns", "del", self.namespace(host)], check=True)

    def _tell(self) -> None:
        self._say({"cut": [sorted(pair) for pair in self._cut]}, "done")

    def _say(self, text: object, answer: str) -> None:
        assert self._switch is not None
        stdin, stdout = _pipe(self._switch.stdin), _pipe(self._switch.stdout)
        stdin.write(json.dumps(text).encode() + b"\n")
        stdin.flush()
        assert stdout.readline().decode().strip() == answer, "the switch has died"

    def _stop_switch(self) -> None:
        assert self._switch is not None
        _pipe(self._switch.stdin).close()
        self._switch.wait(10)
        _pipe(self._switch.stdout).close()


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe

"""An honest client in a separate process, so that it measures the server and not the attack.

`python -m tests.support.attack.honest_client HOST PORT SOURCE` sends one request for one token
after another, with pauses of 5 ms, over one connection from the address SOURCE. Every tenth request
asks for two tokens. When stdin closes, the program prints one JSON object with the seconds until
each first token, and the failures.
"""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
import select
import sys
import time
from dataclasses import dataclass
from typing import Self

_PAUSE_S = 0.005
_ON_EVERY = 10  # one in this many requests asks for a second token, whose time is not measured


def _body(max_tokens: int) -> str:
    return json.dumps(
        {
            "model": "default",
            "prompt": "The quick brown fox",
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
        }
    )


@dataclass(frozen=True)
class Report:
    ttft_s: list[float]
    failures: list[str]

    def percentile(self, fraction: float) -> float:
        return sorted(self.ttft_s)[int(fraction * (len(self.ttft_s) - 1))]


class HonestClient:
    """Starts the client process, and collects its report.

    Usage: `async with HonestClient(port) as honest: ...; report = await honest.stop()`
    """

    def __init__(self, port: int, source: str = "127.0.0.9") -> None:
        self._arguments = ("127.0.0.1", str(port), source)
        self._process: asyncio.subprocess.Process

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.support.attack.honest_client", *self._arguments,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert self._process.stdout is not None
        assert await self._process.stdout.readline() == b"started\n"
        return self

    async def stop(self) -> Report:
        output, _ = await self._process.communicate(b"")  # this closes the client's stdin
        return Report(**json.loads(output))

    async def __aexit__(self, *_: object) -> None:
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


def main() -> None:
    host, port, source = sys.argv[1:]
    connection = http.client.HTTPConnection(host, int(port), timeout=30, source_address=(source, 0))
    ttft_s: list[float] = []
    failures: list[str] = []
    is_started = False
    bodies = itertools.cycle([_body(2), *[_body(1)] * (_ON_EVERY - 1)])
    # Serve at least one request, even if stdin closes at once.
    while not (select.select([sys.stdin], [], [], _PAUSE_S)[0] and (ttft_s or failures)):
        began = time.monotonic()
        try:
            headers = {"content-type": "application/json"}
            connection.request("POST", "/v1/completions", next(bodies), headers)
            response = connection.getresponse()
            first = response.readline()
            ttft_s.append(time.monotonic() - began)
            rest = response.read()
            if response.status != 200 or not first.startswith(b"data: ") or b"[DONE]" not in rest:
                failures.append(f"{response.status} {first[:200]!r} ... {rest[-200:]!r}")
        except (OSError, http.client.HTTPException) as exc:
            failures.append(repr(exc))
            connection.close()
        if not is_started:
            print("started", flush=True)
            is_started = True
            ttft_s.clear()
    print(json.dumps({"ttft_s": ttft_s, "failures": failures}))


if __name__ == "__main__":
    main()

"""An honest client in a process of its own, so that what it measures is the server and not the attack beside it.

`python -m tests.support.honest_client HOST PORT SOURCE` asks for two tokens every 10 ms over one connection from the address
SOURCE, until its standard input closes; then it prints one JSON object: seconds each answer took, and failures.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import select
import sys
import time
from dataclasses import dataclass
from typing import Self

_BODY = json.dumps(
    {"model": "default", "prompt": "The quick brown fox", "max_tokens": 2, "ignore_eos": True}
)


@dataclass(frozen=True)
class Report:
    latencies_s: list[float]
    failures: list[str]

    def percentile(self, fraction: float) -> float:
        return sorted(self.latencies_s)[int(fraction * (len(self.latencies_s) - 1))]


class HonestClient:
    """`async with HonestClient(port) as honest: ...; report = await honest.stop()`"""

    def __init__(self, port: int, source: str = "127.0.0.9") -> None:
        self._arguments = ("127.0.0.1", str(port), source)
        self._process: asyncio.subprocess.Process

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.support.honest_client", *self._arguments,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert self._process.stdout is not None
        assert await self._process.stdout.readline() == b"started\n"
        return self

    async def stop(self) -> Report:
        output, _ = await self._process.communicate(b"")  # closes its input
        return Report(**json.loads(output))

    async def __aexit__(self, *_: object) -> None:
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


def main() -> None:
    host, port, source = sys.argv[1:]
    connection = http.client.HTTPConnection(host, int(port), timeout=30, source_address=(source, 0))
    latencies_s: list[float] = []
    failures: list[str] = []
    is_started = False
    while not select.select([sys.stdin], [], [], 0.01)[0]:
        began = time.monotonic()
        try:
            headers = {"content-type": "application/json"}
            connection.request("POST", "/v1/completions", _BODY, headers)
            response = connection.getresponse()
            body = response.read()
            if response.status != 200:
                failures.append(f"{response.status} {body[:200]!r}")
        except (OSError, http.client.HTTPException) as exc:
            failures.append(repr(exc))
            connection.close()
        latencies_s.append(time.monotonic() - began)
        if not is_started:
            print("started", flush=True)
            is_started = True
            latencies_s.clear()
    print(json.dumps({"latencies_s": latencies_s, "failures": failures}))


if __name__ == "__main__":
    main()

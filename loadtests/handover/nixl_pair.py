"""Two engines with vLLM's NixlConnector.

They are used as vLLM's proxies use them: the prefill draws one token, and the decode draws the
answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtests.handover.timing import Timing
from pdmesh.embedded.ports import PortReservation


class _Engine:
    def __init__(self, model_dir: Path, nixl_dir: Path) -> None:
        reader, writer = os.pipe()
        with PortReservation("127.0.0.1", 0) as free:
            side_channel = str(free.port)
        libraries = nixl_dir / "nvidia" / "cu13" / "lib"  # nixl needs this library
        path = os.pathsep.join([*(p for p in sys.path if p), str(nixl_dir)])
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "loadtests.handover.nixl_engine",
                str(model_dir),
                side_channel,
                str(writer),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=[writer],
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": path, "LD_LIBRARY_PATH": str(libraries)},
        )
        os.close(writer)
        self._answers = os.fdopen(reader)

    def wait_ready(self) -> None:
        if self._answers.readline().strip() != "ready":
            assert self._process.stderr is not None
            last = self._process.stderr.read().strip().splitlines()[-1:]
            raise RuntimeError(f"vLLM with NixlConnector did not start: {''.join(last)}")

    def ask(self, prompt: Sequence[int], max_tokens: int, params: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        job = {"prompt": list(prompt), "max_tokens": max_tokens, "params": params}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._answers.readline())
        return answer

    def close(self) -> None:
        self.signal(signal.SIGKILL)
        self._answers.close()
        with self._process:  # this closes the pipes and waits for the process
            pass

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process and to its child process, vLLM's engine."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


class NixlPair:
    """Two engines, which are paused (SIGSTOP) while other variants are measured.

    Otherwise nixl's progress threads would poll all the time and take a core.
    """

    def __init__(self, model_dir: Path, nixl_dir: Path) -> None:
        self._engines = [_Engine(model_dir, nixl_dir) for _ in range(2)]
        for engine in self._engines:
            engine.wait_ready()
        self._signal(signal.SIGSTOP)

    def ask(self, prompt: Sequence[int], max_tokens: int) -> Timing:
        """Send a prompt through both engines.

        The client's token 1 is the one that the decode draws. The prefill's token is discarded, as
        vLLM's proxies do.
        """
        self._signal(signal.SIGCONT)
        try:
            return self._ask(prompt, max_tokens)
        finally:
            self._signal(signal.SIGSTOP)

    def _ask(self, prompt: Sequence[int], max_tokens: int) -> Timing:
        prefill, decode = self._engines
        asked = time.monotonic()
        first = prefill.ask(prompt, 1, {"do_remote_decode": True, "do_remote_prefill": False})
        # Otherwise, the decode would report tokens from the prefill's cache as cached by itself.
        first["params"].pop("remote_prefill_cached_tokens", None)
        rest = decode.ask(prompt, max_tokens, first["params"])
        if rest["num_cached"] < len(prompt) - 1:
            raise RuntimeError(f"{rest['num_cached']} of {len(prompt)} tokens were handed over")
        return Timing.of(asked, rest["times"], rest["tokens"])

    def close(self) -> None:
        for engine in self._engines:
            engine.close()

    def _signal(self, number: signal.Signals) -> None:
        for engine in self._engines:
            engine.signal(number)

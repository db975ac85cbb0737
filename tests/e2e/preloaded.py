"""Starts vLLM's processes with vLLM already imported.

An import takes 9 s of CPU time, and the e2e tests start hundreds of processes. The processes are
forked from a server that imports vLLM once. Only the engines of whole meshes are spawned by
services, as in production.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import context, forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from pdmesh.engine.vllm.child.child_main import HOST_PID

_MODULES = [
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.entrypoints.llm",
    "vllm.model_executor.models.llama",
    "pdmesh.engine.vllm.connector.connector",
]
# The environment of the server. vLLM reads some of these variables at its import. HOST_PID is the
# test process. When it ends, the forked processes end.
_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    HOST_PID: str(os.getpid()),
}


class _Process(context.ForkServerProcess):
    """A forked process that gets its parent's environment, as a spawned process does."""

    def start(self) -> None:
        self._environment = dict(os.environ)
        with pytest.MonkeyPatch.context() as patch:  # the first process starts the server
            for name, value in _ENVIRONMENT.items():
                patch.setenv(name, value)
            super().start()

    def run(self) -> None:
        missing = [name for name in _MODULES if name not in sys.modules]
        assert not missing, f"the server could not import {missing}"
        os.environ.clear()
        os.environ.update(self._environment)
        if num_threads := os.environ.get("OMP_NUM_THREADS"):  # OpenMP has read the server's value
            import torch

            torch.set_num_threads(int(num_threads))
        # This process starts the ranks, which are forked from the same server.
        _replace_spawn(patch := pytest.MonkeyPatch())
        patch.setattr(forkserver._forkserver, "ensure_running", lambda: None)
        super().run()


class _Context(context.SpawnContext):
    Process = _Process  # type: ignore[assignment]


_context = _Context()


def _replace_spawn(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(context._concrete_contexts, "spawn", _context)  # type: ignore[attr-defined]


@contextmanager
def preloaded() -> Iterator[None]:
    """Within the block, spawned child processes of this process are forked from the server."""
    multiprocessing.set_forkserver_preload(_MODULES)
    with pytest.MonkeyPatch.context() as patch:
        _replace_spawn(patch)
        yield


def run_main(main: Callable[[], None], arguments: list[str], log: Path) -> BaseProcess:
    """Start a process that runs `main` as a program with these arguments, and logs to a file."""
    process = _Process(target=_main, args=(main, arguments, log))
    process.start()
    return process


def _main(main: Callable[[], None], arguments: list[str], log: Path) -> None:
    with log.open("ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = [main.__module__, *arguments]
    main()

"""A mesh's HTTP answers equal those of vLLM's own server, and vLLM's own benchmark runs.

The same requests go first to a vLLM server, and then to a mesh of one prefill and one decode.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from pdmesh.launcher.mesh import Mesh
from pdmesh.launcher.spec import MeshSpec
from tests.e2e.cases import VOCABULARY
from tests.e2e.conftest import BLOCK_SIZE, DTYPE

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),  # vLLM emits warnings
    pytest.mark.asyncio(loop_scope="session"),
]
_RNG = random.Random(15)
# Some prompts have more tokens than one step computes.
PROMPTS = [_RNG.choices(VOCABULARY, k=_RNG.choice((2, 5, 63, 64, 65, 130, 700))) for _ in range(20)]
PARIS = "The capital of France is"
COFFEE = "Ein Caf\u00e9 \u2014 \U0001f600 und"
HELLO = [{"role": "user", "content": "Say hello."}]
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    *(
        ("completions", {"prompt": prompt, "max_tokens": 2, "prompt_logprobs": index % 4})
        for index, prompt in enumerate(PROMPTS)
    ),
    ("completions", {"prompt": COFFEE, "max_tokens": 3, "prompt_logprobs": 2}),
    # Every token of this prompt has whole characters. For a part of a character, the mesh returns
    # `bytes:...`, as OpenAI's API does.
    ("completions", {"prompt": "Ein Caf\u00e9 und", "max_tokens": 3, "echo": True, "logprobs": 0}),
    ("completions", {"prompt": PARIS, "max_tokens": 4, "echo": True, "logprobs": 2}),
    ("completions", {"prompt": PARIS, "max_tokens": 0, "echo": True, "logprobs": 1}),
    ("completions", {"prompt": PARIS, "max_tokens": 0, "echo": True}),
    ("completions", {"prompt": [PARIS, "One two"], "max_tokens": 3, "echo": True, "logprobs": 1}),
    ("completions", {"prompt": "1, 2, 3,", "max_tokens": 20, "stop": [" 7", " 8"]}),
    (
        "completions",
        {
            "prompt": "1, 2, 3,",
            "max_tokens": 20,
            "stop": [" 7"],
            "include_stop_str_in_output": True,
        },
    ),
    ("completions", {"prompt": "1, 2, 3,", "max_tokens": 9, "stop_token_ids": [28]}),
    ("completions", {"prompt": PARIS, "max_tokens": 4, "return_token_ids": True}),
    ("chat/completions", {"messages": HELLO, "max_tokens": 40, "prompt_logprobs": 1}),
    ("chat/completions", {"messages": HELLO, "max_tokens": 3, "return_token_ids": True}),
]


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    }


@pytest.fixture(scope="module")
def vllm_answers(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The answers of vLLM's own server, which stops before the mesh starts."""
    with serving(model_dir, tmp_path_factory.mktemp("served")) as url:
        return [asked(url, path, body) for path, body in REQUESTS]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


class serving:  # noqa: N801  # a context manager, named as one
    def __init__(self, model_dir: Path, folder: Path) -> None:
        port = free_port()
        self._url, self._log = f"http://127.0.0.1:{port}", folder / "log"
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(model_dir), "--served-model-name", "default", "--dtype", DTYPE),
            *("--enforce-eager", "--block-size", str(BLOCK_SIZE), "--max-model-len", "2048"),
            *("--max-num-seqs", "16", "--gpu-memory-utilization", "0.3"),
            *("--kv-cache-memory-bytes", str(512 << 20), "--port", str(port)),
        ]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment(), start_new_session=True
            )

    def __enter__(self) -> str:
        until = time.monotonic() + 300
        while True:
            assert self._process.poll() is None, self._log.read_text()[-3000:]
            assert time.monotonic() < until, self._log.read_text()[-3000:]
            try:
                if httpx.get(f"{self._url}/health").status_code == 200:
                    return self._url
            except httpx.TransportError:
                time.sleep(0.5)

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(60)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def mesh(
    model_dir: Path, vllm_answers: list[Any], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Mesh]:
    """The mesh.

    It starts after vLLM has answered, because two cores are too few for both at once.
    """
    spec = MeshSpec(
        engine="vllm",
        num_prefill=1,
        num_decode=1,
        http_port=0,
        grpc_port=0,
        model_dir=model_dir,
        dtype=DTYPE,
        env={"PDMESH_BLOCK_SIZE": str(BLOCK_SIZE), "PDMESH_GATEWAY_TTFT_S": "120"},
        start_timeout_s=240,
    )
    async with Mesh(spec, tmp_path_factory.mktemp("mesh")) as running:
        yield running


def asked(url: str, path: str, body: dict[str, Any]) -> Any:
    given = {"model": "default", "temperature": 0, **body}
    answer = httpx.post(f"{url}/v1/{path}", json=given, timeout=300)
    assert answer.status_code == 200, answer.text
    return answer.json()


def told(answer: Any) -> Any:
    """The fields that both servers give.

    vLLM's answers have further fields, and the mesh's answers have cached tokens.
    """
    usage = {name: answer["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
    choices = [
        {
            "text": choice.get("text", choice.get("message", {}).get("content")),
            "finish_reason": choice["finish_reason"],
            "stop_reason": choice["stop_reason"],
            "logprobs": choice["logprobs"],
            "token_ids": choice.get("token_ids"),
            "prompt_token_ids": choice.get("prompt_token_ids"),
            "prompt_logprobs": choice.get("prompt_logprobs"),
        }
        for choice in answer["choices"]
    ]
    of_chat = {name: answer.get(name) for name in ("prompt_token_ids", "prompt_logprobs")}
    return {"usage": usage, "choices": choices, **of_chat}


def differences(theirs: Any, ours: Any, at: str = "") -> Iterator[str]:
    """The paths of differences. Floats and high ranks may differ a little because of rounding."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        if theirs.keys() != ours.keys():
            yield f"{at}: {sorted(theirs)} not {sorted(ours)}"
            return
        for name, value in theirs.items():
            yield from differences(value, ours[name], f"{at}.{name}")
    elif isinstance(theirs, list) and isinstance(ours, list):
        if len(theirs) != len(ours):
            yield f"{at}: {len(theirs)} not {len(ours)}"
            return
        for index, pair in enumerate(zip(theirs, ours, strict=True)):
            yield from differences(*pair, f"{at}[{index}]")
    elif isinstance(theirs, float) or at.endswith(".rank"):
        if ours != pytest.approx(theirs, rel=2e-2 if at.endswith(".rank") else 1e-3, abs=1e-3):
            yield f"{at}: {theirs} not {ours}"
    elif theirs != ours:
        yield f"{at}: {theirs!r} not {ours!r}"


@pytest.mark.nightly
@pytest.mark.req("S1")
async def test_each_field_equals_that_of_vllms_own_server(
    mesh: Mesh, vllm_answers: list[Any]
) -> None:
    wrong: dict[str, list[str]] = {}
    for (path, body), theirs in zip(REQUESTS, vllm_answers, strict=True):
        ours = await asyncio.to_thread(asked, mesh.http_url, path, body)
        if found := list(differences(told(theirs), told(ours))):
            wrong[json.dumps(body)[:200]] = found[:8]
    assert not wrong, json.dumps(wrong, indent=1)


async def bench(url: str, model_dir: Path, folder: Path, *options: str) -> dict[str, Any]:
    command = [
        *(sys.executable, "-m", "tests.e2e.bench_serve", "--base-url", url, "--model", "default"),
        *("--tokenizer", str(model_dir), "--dataset-name", "random", "--random-input-len", "40"),
        *("--random-output-len", "8", "--num-prompts", "8", "--seed", "1", "--ignore-eos"),
        *("--save-result", "--result-dir", str(folder), "--result-filename", "result.json"),
        *options,
    ]
    process = await asyncio.create_subprocess_exec(
        *command,
        env=environment(),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()[-3000:]
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


BACKENDS = [
    pytest.param(("--backend", "openai", "--endpoint", "/v1/completions"), id="completions"),
    pytest.param(("--backend", "openai-chat", "--endpoint", "/v1/chat/completions"), id="chat"),
]


@pytest.mark.nightly
@pytest.mark.parametrize("options", BACKENDS)
async def test_vllms_own_benchmark_runs_against_the_mesh(
    mesh: Mesh, model_dir: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    result = await bench(mesh.http_url, model_dir, tmp_path, *options)
    assert (result["completed"], result["failed"]) == (8, 0)
    assert result["total_output_tokens"] == 64


@pytest.mark.parametrize(
    "options",
    [BACKENDS[0], pytest.param(*BACKENDS[1].values, id="chat", marks=pytest.mark.nightly)],
)
async def test_vllms_own_benchmark_runs_against_a_mesh_on_sim(
    model_dir: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    """The benchmark sends its sampling parameters. Each changes the tokens of the sim engine."""
    spec = MeshSpec(engine="sim", http_port=0, grpc_port=0, model_dir=model_dir)
    shaping = ("--temperature", "0.7", "--top-k", "5", "--repetition-penalty", "1.1")
    async with Mesh(spec, tmp_path / "mesh") as mesh:
        result = await bench(mesh.http_url, model_dir, tmp_path, *options, *shaping)
    assert (result["completed"], result["failed"]) == (8, 0)
    assert result["total_output_tokens"] == 64

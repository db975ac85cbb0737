"""The mesh's weight loader in vLLM gives each rank the same weights as vLLM's own loader.

This also holds for a draft model, which proposes tokens.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.tiny_llama import write_tiny_llama

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),  # vLLM emits warnings
]
SHARD = "12MB"  # this gives five files, and the file with the embedding has 42 MB


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_llama(tmp_path_factory.mktemp("sharded"), max_shard_size=SHARD)
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


def loaded(model: Path, loader: str, num_ranks: int, draft: Path | str, folder: Path) -> Any:
    """The weights that a vLLM with this loader holds, and the log output."""
    results = folder / f"{loader}-{num_ranks}.json"
    arguments = [model, loader, num_ranks, draft, results]
    command = [sys.executable, "-m", "tests.e2e.loading.loaded_weights", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert results.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(results.read_text()), done.stdout + done.stderr


def allocations(output: str) -> list[int]:
    """The number of allocations for each model that the mesh's loader read."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", output)
    lines = [line for line in plain.splitlines() if "vllm.weights_read" in line]
    return [int(found) for line in lines for found in re.findall(r"num_allocations=(\d+)", line)]


@pytest.mark.req("S84", "S85", "S86", "S88")
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_each_rank_holds_the_weights_that_vllms_loader_gives_it(
    sharded: Path, tmp_path: Path, num_ranks: int
) -> None:
    """The draft's weights differ from the model's, so a mix-up would show."""
    draft = ""
    if num_ranks == 2:
        draft = str(write_tiny_llama(tmp_path / "draft", seed=1))
    plain, vllms_output = loaded(sharded, "vllm", num_ranks, draft, tmp_path)
    ours, output = loaded(sharded, "file_order", num_ranks, draft, tmp_path)
    assert ours == plain
    assert len(ours["ranks"]) == num_ranks
    for digests in ours["ranks"]:
        assert any(name.startswith("draft.") for name in digests) == bool(draft)
    if num_ranks == 2:
        assert ours["ranks"][0] != ours["ranks"][1], "each rank has its own part"
    assert allocations(output) == [1] * (2 if draft else 1)
    assert allocations(vllms_output) == []

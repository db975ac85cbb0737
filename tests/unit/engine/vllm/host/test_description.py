"""What a started vLLM tells the mesh about itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdmesh.core.images.prompt_image import ImageFacts
from pdmesh.engine.vllm.config import VllmConfig
from pdmesh.engine.vllm.host.description import endpoint_of, info_of
from pdmesh.engine.vllm.messages import RankHello
from pdmesh.errors import EngineFailed

CONFIG = VllmConfig("prefill-0", 1, Path("model"), "m", device="cpu", block_size=16)
HELLO = RankHello(0, 2, 1, "a", "f", 11, 1024, 2)
OTHER = RankHello(1, 2, 2, "b", "f", 11, 1024, 2)


def test_both_ranks_are_described() -> None:
    endpoint = endpoint_of(CONFIG, 16, [HELLO, OTHER])
    info = info_of(CONFIG, endpoint, [HELLO, OTHER])
    assert info.kv_addresses == ("a", "b")
    assert (info.num_ranks, info.num_kv_blocks, info.kv_bytes_per_token) == (2, 10, 128)


def test_an_unwanted_block_size_and_ranks_that_differ_are_refused() -> None:
    with pytest.raises(EngineFailed, match="block size of 32"):
        endpoint_of(CONFIG, 32, [HELLO])
    with pytest.raises(EngineFailed, match="different layouts"):
        endpoint_of(CONFIG, 16, [HELLO, RankHello(1, 2, 2, "b", "other", 11, 1024, 2)])


@pytest.mark.req("S130")
def test_an_engine_whose_model_takes_images_fetches_embeddings() -> None:
    endpoint = endpoint_of(CONFIG, 16, [HELLO])
    assert not info_of(CONFIG, endpoint, [HELLO]).fetches_embeddings
    assert info_of(CONFIG, endpoint, [HELLO], ImageFacts(3, (3, 3), 1)).fetches_embeddings

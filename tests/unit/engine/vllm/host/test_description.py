"""A started vLLM describes itself to the mesh."""

from __future__ import annotations

from array import array
from dataclasses import replace
from pathlib import Path

import pytest

from pdmesh.core.images.prompt_image import ImageFacts
from pdmesh.engine.base import PrefillJob, Sampling
from pdmesh.engine.vllm.config import VllmConfig
from pdmesh.engine.vllm.host.description import endpoint_of, info_of, num_kv_blocks
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


@pytest.mark.req("S120")
def test_a_pipelines_tickets_have_the_bytes_of_its_largest_stage() -> None:
    """The stages have 3 and 2 layers of 512 bytes each. A range with the size of the largest stage
    has room for each stage's share.
    """
    first, last = (
        RankHello(0, 2, 1, "a", "f", 11, 1536, 3),
        RankHello(1, 2, 2, "b", "f", 11, 1024, 2),
    )
    endpoint = endpoint_of(CONFIG, 16, [first, last])
    info = info_of(CONFIG, endpoint, [first, last])
    job = PrefillJob(1, "r", 0, array("I", range(33)), Sampling(max_tokens=1), "t")
    assert endpoint.ticket(job).kv_bytes == 3 * 1536
    assert info.kv_bytes_per_token * 16 // info.num_ranks == 1536


def test_layers_with_a_window_make_tickets_smaller_and_count_as_full_in_the_capacity() -> None:
    """After 100 tokens, the next one sees 19 of them in layer 1: tokens 81 to 99, in blocks 5 and 6
    of 7.
    """
    hello = RankHello(0, 1, 1, "a", "f", 41, 1024, 2, (0, 20), 2, 1)
    endpoint = endpoint_of(replace(CONFIG, max_model_len=256), 16, [hello])
    job = PrefillJob(1, "r", 0, array("I", range(100)), Sampling(max_tokens=1), "t")
    assert endpoint.ticket(job).kv_bytes == (7 + 2) * 512
    assert endpoint.named_group == 1
    assert num_kv_blocks(hello, 256, 16) == 20, "two groups share 40 blocks"
    assert num_kv_blocks(hello, 1024, 16) == 64, "vLLM starts only if the longest prompt fits"


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

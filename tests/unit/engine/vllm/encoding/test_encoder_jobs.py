"""A vLLM encoder with images that several jobs wait for, and with images that no job waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from pdmesh.core.images.prompt_image import ImageFacts, PromptImage
from pdmesh.engine.base import EncodeJob
from pdmesh.engine.vllm.encoding.config import VllmEncoderConfig
from pdmesh.engine.vllm.encoding.engine import VllmEncoderEngine
from tests.support.waiting import until

pytestmark = pytest.mark.filterwarnings("default")  # vLLM itself raises these warnings
BATCH = 2


class NeverMade:
    """Stands in for an image processor that never finishes an image."""

    def __init__(self) -> None:
        self.num_begun = 0

    async def input_of(
        self, prompt: list[int], images: Sequence[PromptImage], salt: str, stop: Callable[[], bool]
    ) -> Any:
        self.num_begun += 1
        await asyncio.Event().wait()


def encoder() -> tuple[VllmEncoderEngine, NeverMade]:
    engine = VllmEncoderEngine(VllmEncoderConfig("e", 1, Path(), "m", max_num_seqs=BATCH))
    images = NeverMade()
    engine._llm, engine._images = object(), images  # type: ignore[assignment]
    engine._facts = ImageFacts(9, (9,), 1)
    return engine, images


def job(leg: int, image: int) -> EncodeJob:
    return EncodeJob(leg, f"r{leg}", (PromptImage(0, 1, bytes([image] * 32), b"data"),))


async def test_of_images_whose_clients_left_no_more_than_a_batch_is_encoded() -> None:
    engine, images = encoder()
    for leg in range(1, 21):
        engine.encode(job(leg, leg))
    await until(lambda: images.num_begun == 20)
    assert engine.stats().num_running == 20
    for leg in range(1, 20):
        engine.abort(leg)
    await until(lambda: engine.stats().num_running == BATCH + 1)
    await engine.stop()


async def test_an_image_that_another_job_awaits_is_not_dropped() -> None:
    engine, images = encoder()
    for leg in range(1, 8):
        engine.encode(job(leg, image=min(leg, 6)))  # legs 6 and 7 wait for the same image
    await until(lambda: images.num_begun == 6)
    for leg in range(1, 7):
        engine.abort(leg)
    await until(lambda: engine.stats().num_running == BATCH + 1)
    assert 7 in engine._jobs
    assert len(engine._jobs) == 1
    engine.encode(job(8, image=5))  # the image was dropped, so it is processed again
    await until(lambda: images.num_begun == 7)
    assert engine.stats().num_running == BATCH + 2
    assert 8 in engine._jobs
    assert len(engine._jobs) == 2
    await engine.stop()

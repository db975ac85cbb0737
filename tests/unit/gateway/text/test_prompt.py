"""The names of an answer's blocks continue those of its prompt."""

from __future__ import annotations

import random
from array import array

import pytest

from pdmesh.core.images.prompt_image import PromptImage
from pdmesh.services.gateway.text.prompt import Prompt
from pdmesh.v1.common_pb2 import InstanceRecord

RECORD = InstanceRecord(model_fingerprint="f", block_size=16)


def prompt_of(tokens: array[int], images: tuple[PromptImage, ...] = ()) -> Prompt:
    return Prompt(tokens, b"secret", "tenant", "salt", images=images)


@pytest.mark.parametrize("num_prompt", [1, 15, 16, 17, 40])
@pytest.mark.parametrize("num_answer", [1, 2, 16, 17, 50])
@pytest.mark.parametrize("position", [None, 0, 12, 30])
def test_the_answers_names_are_those_that_the_next_turn_has(
    num_prompt: int, num_answer: int, position: int | None
) -> None:
    rng = random.Random(num_prompt)
    tokens = array("I", rng.choices(range(1000), k=num_prompt))
    answer = rng.choices(range(1000), k=num_answer)
    images: tuple[PromptImage, ...] = ()
    if position is not None and position < num_prompt:
        images = (PromptImage(position, min(8, num_prompt - position), b"d" * 32, b""),)
    prompt = prompt_of(tokens, images)
    later = prompt_of(tokens + array("I", [*answer, 7, 7]), images).hashes(RECORD)
    before, names = prompt.hashes(RECORD), prompt.answer_hashes(RECORD, answer)
    assert [*before, *names] == later[: (num_prompt + num_answer - 1) // 16]


def test_without_blocks_there_are_no_names() -> None:
    assert prompt_of(array("I", [1] * 40)).answer_hashes(InstanceRecord(), [1] * 40) == []

"""The block names of an answer continue those of its prompt."""

from __future__ import annotations

import random
from array import array

import pytest

from pdmesh.core.images.prompt_image import PromptImage
from pdmesh.core.kv.prefix.kept_hashes import CHUNK_BLOCKS, KeptHashes
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


@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_a_long_prompt_is_hashed_in_steps(num_steps: int) -> None:
    """Between two steps, the event loop may do other work."""
    step = 4 * CHUNK_BLOCKS * 16
    tokens = array("I", random.Random(3).choices(range(1000), k=num_steps * step + 17))
    prompt, kept = prompt_of(tokens), KeptHashes()
    assert len(list(prompt.hashing(RECORD, kept))) == num_steps
    assert prompt.hashes(RECORD) == prompt_of(tokens).hashes(RECORD)
    assert len(kept) == 4 * num_steps, "and nothing was hashed by `hashes` itself"
    assert not list(prompt.hashing(RECORD, kept)), "once is enough"
    assert kept.num_found == 0


@pytest.mark.parametrize("images", [(), (PromptImage(3, 8, b"d" * 32, b""),)])
def test_a_prompt_that_is_short_or_has_images_is_hashed_at_once(
    images: tuple[PromptImage, ...],
) -> None:
    length = 40 if not images else 5 * CHUNK_BLOCKS * 16
    prompt, kept = prompt_of(array("I", [1] * length), images), KeptHashes()
    assert not list(prompt.hashing(RECORD, kept))
    assert not len(kept)
    assert len(prompt.hashes(RECORD)) == length // 16

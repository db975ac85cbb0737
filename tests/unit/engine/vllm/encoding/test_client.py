"""The host of a vLLM prefill whose ranks cannot fetch images' embeddings from the encoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pdmesh.core.images.avoided_encoders import LIMIT
from pdmesh.core.kv.transfer.ticket import PullFailure
from pdmesh.engine.base import KvPeer
from pdmesh.engine.vllm.encoding import client
from pdmesh.engine.vllm.encoding.plan import LANDED
from pdmesh.engine.vllm.messages import (
    EmbeddingsFetched,
    FetchEmbeddings,
    ForgetEmbeddings,
    RankMessage,
    ToHost,
)

pytestmark = pytest.mark.req("S130")

ENCODER = KvPeer("encoder-0", 1, ("address",))


@dataclass(frozen=True)
class Placeholder:
    num_tokens: int = 4

    def get_num_embeds(self) -> int:
        return self.num_tokens


REQUEST: dict[str, Any] = {
    "mm_hashes": {"image": ["one", "two"]},
    "mm_placeholders": {"image": [Placeholder(), Placeholder()]},
}


class Ranks:
    """Stands in for the workers. Each rank answers every fetch with (number of images, failure)."""

    def __init__(self, *answers: tuple[int, str]) -> None:
        self.answers = answers
        self.on_message: Callable[[ToHost], None] = lambda _: None
        self.fetches: list[int] = []
        # the images of the last fetch, with their numbers of tokens
        self.asked: dict[str, int] = {}
        self.forgotten: list[int] = []

    def __call__(self, on_message: Callable[[ToHost], None], _: object) -> Ranks:
        self.on_message = on_message
        return self

    async def listen(self, path: Path) -> None: ...

    async def close(self) -> None: ...

    def broadcast(self, message: RankMessage) -> None:
        match message:
            case FetchEmbeddings():
                self.fetches.append(message.leg)
                self.asked = dict(zip(message.identifiers, message.num_tokens, strict=True))
                for rank, (num, failure) in enumerate(self.answers):
                    self.on_message(EmbeddingsFetched(rank, message.leg, num, failure))
            case ForgetEmbeddings():
                self.forgotten.append(message.leg)


async def landed(
    ranks: Ranks, num_legs: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[int], Mapping[str, float]]:
    """Run prompts one after another.

    Returns the number of images that arrived for each prompt, and the counters.
    """
    monkeypatch.setattr(client, "ControlServer", ranks)
    host = client.EmbeddingClient(len(ranks.answers))
    await host.listen(Path(), lambda _: None)
    found = []
    for leg in range(num_legs):
        host.awaited.expect(leg)
        host.awaited.tell(leg, ENCODER)
        told = await host.landed(leg, REQUEST)
        found.append(len(told[LANDED]["identifiers"]) if told else 0)
    await host.close()
    return found, host.awaited.numbers()


@pytest.mark.fault("F34")
async def test_after_some_failures_of_a_rank_no_rank_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = Ranks((2, ""), (0, PullFailure.TIMEOUT))
    found, numbers = await landed(ranks, LIMIT + 2, monkeypatch)
    assert found == [0] * (LIMIT + 2)
    assert ranks.fetches == ranks.forgotten == [*range(LIMIT)]
    assert (numbers["num_embeddings_lost"], numbers["num_embeddings_skipped"]) == (2 * LIMIT, 4)


async def test_evicted_embeddings_do_not_count_against_the_encoder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = Ranks((2, ""), (0, ""))
    found, numbers = await landed(ranks, LIMIT + 2, monkeypatch)
    assert found == [0] * (LIMIT + 2)
    assert ranks.fetches == ranks.forgotten == [*range(LIMIT + 2)]
    assert numbers["num_embeddings_skipped"] == 0


async def test_a_request_uses_what_all_ranks_have(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks((2, ""), (1, ""))
    found, numbers = await landed(ranks, 1, monkeypatch)
    assert (found, ranks.forgotten) == ([1], [])
    assert (numbers["num_embeddings_fetched"], numbers["num_embeddings_lost"]) == (1, 1)


@pytest.mark.req("S129")
async def test_images_of_one_length_are_asked_for_together(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks((3, ""))
    monkeypatch.setattr(client, "ControlServer", ranks)
    host = client.EmbeddingClient(1)
    await host.listen(Path(), lambda _: None)
    host.awaited.expect(1)
    host.awaited.tell(1, ENCODER)
    names, lengths = ["a", "b", "c", "a", "d"], [6, 4, 6, 6, 4]
    request = {
        "mm_hashes": {"image": names},
        "mm_placeholders": {"image": [Placeholder(length) for length in lengths]},
    }
    told = await host.landed(1, request)
    assert list(ranks.asked.items()) == [("b", 4), ("d", 4), ("a", 6), ("c", 6)]
    assert told[LANDED]["identifiers"] == ["b", "d", "a"]

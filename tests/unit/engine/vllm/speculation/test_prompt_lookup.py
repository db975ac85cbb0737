"""Each request has its own cursor, in any row of vLLM's batch.

The cursor is the place in the text from which the answer copies. The cursor lasts until vLLM
forgets the request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import numpy as np
import pytest

from pdmesh.engine.vllm.sampling_extras import NUM_DRAWN
from pdmesh.engine.vllm.speculation.prompt_lookup import MAX_BEHIND, PromptLookup

LENGTH = 4096


class Runner:
    """Stands in for vLLM's model runner, with known requests and rows in any order."""

    def __init__(self, max_model_len: int = LENGTH) -> None:
        config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=max_model_len))
        self.proposer = PromptLookup(config)
        self.texts: dict[str, list[int]] = {}
        self.requests: dict[str, SimpleNamespace] = {}

    def begin(
        self,
        request_id: str,
        prompt: Sequence[int],
        drawn: Sequence[int] = (),
        max_tokens: int = LENGTH,
    ) -> None:
        """Begin a request. `max_tokens` does not include the tokens that were drawn before."""
        self.texts[request_id] = [*prompt, *drawn]
        params = SimpleNamespace(max_tokens=max_tokens, extra_args={NUM_DRAWN: len(drawn)})
        self.requests[request_id] = SimpleNamespace(
            output_token_ids=list(drawn), sampling_params=params
        )

    def forget(self, request_id: str) -> None:
        del self.texts[request_id], self.requests[request_id]

    def step(self, drawn: Mapping[str, Sequence[int]], num: int = 4) -> dict[str, list[int]]:
        """Run a step with these rows in this order. Returns the proposals."""
        texts = np.zeros((len(drawn), LENGTH), dtype=np.int32)
        lengths = np.zeros(len(drawn), dtype=np.int32)
        for row, (request_id, tokens) in enumerate(drawn.items()):
            self.texts[request_id] += tokens
            self.requests[request_id].output_token_ids += tokens
            text = self.texts[request_id]
            texts[row, : len(text)], lengths[row] = text, len(text)
        self.proposer.begin_step(list(drawn), self.requests, num)
        rows = self.proposer.propose(list(drawn.values()), lengths, texts, slot_mappings=None)
        assert len(rows) == len(drawn)
        return dict(zip(drawn, rows, strict=True))


def text(begin: int) -> list[int]:
    return list(range(begin, begin + 50))


@pytest.mark.req("S116")
def test_a_row_keeps_its_cursor_when_the_batch_changes() -> None:
    runner = Runner()
    for name, begin in (("a", 100), ("b", 200), ("c", 300)):
        runner.begin(name, text(begin))
    assert runner.step({"a": [110], "b": [210], "c": [310]}) == {
        "a": [111, 112, 113, 114],
        "b": [211, 212, 213, 214],
        "c": [311, 312, 313, 314],
    }
    # Request a has ended, and c takes the row of a.
    runner.forget("a")
    got = runner.step({"c": [311, 312], "b": [211, 212, 213, 214, 215]})
    assert got == {"c": [313, 314, 315, 316], "b": [216, 217, 218, 219]}


@pytest.mark.req("S49")
@pytest.mark.parametrize("drawn", [[], [110, 111, 112]])
def test_nothing_is_proposed_beyond_the_end_of_the_answer(drawn: list[int]) -> None:
    """The step after this one draws one more token than it checks."""
    runner = Runner()
    runner.begin("a", text(100), drawn, max_tokens=5)
    first = drawn[-1] + 1 if drawn else 110
    assert runner.step({"a": [first]}) == {"a": [first + 1, first + 2, first + 3]}
    assert runner.step({"a": [first + 1]}) == {"a": [first + 2, first + 3]}
    assert runner.step({"a": [first + 2, first + 3]}) == {"a": []}


@pytest.mark.req("S116")
def test_nothing_is_kept_of_requests_that_ended() -> None:
    runner = Runner()
    for number in range(20):
        runner.begin(f"r{number}", text(100))
        runner.step({f"r{number}": [110]})
        runner.forget(f"r{number}")
    runner.begin("last", text(100))
    runner.step({"last": [110]})
    assert list(runner.proposer._cursors) == ["last"]


def test_a_preempted_request_goes_on_where_it_was() -> None:
    """vLLM removes the request from the batch but does not forget it. The request's text is there
    again in the next step.
    """
    runner = Runner()
    runner.begin("a", [*text(100), *text(100)])
    runner.begin("b", text(200))
    runner.step({"a": [110, 111], "b": [210]})
    runner.step({"b": [211]})
    assert runner.step({"b": [212], "a": [112]})["a"] == [113, 114, 115, 116]


@pytest.mark.req("S117")
def test_a_request_that_comes_with_drawn_tokens_goes_on_in_their_copy() -> None:
    """After a hand-over or a migration, prompt and drawn tokens arrive together."""
    runner = Runner()
    runner.begin("moved", text(100), drawn=[120, 121, 122, 123])
    assert runner.step({"moved": [124]})["moved"] == [125, 126, 127, 128]


def test_a_prompt_in_chunks_proposes_nothing() -> None:
    runner = Runner()
    runner.begin("a", text(100))
    assert runner.step({"a": []}) == {"a": []}
    assert not runner.proposer._cursors, "its text is not complete yet"
    assert runner.step({"a": [110]}) == {"a": [111, 112, 113, 114]}


@pytest.mark.req("S118")
def test_a_step_that_may_propose_nothing_does_nothing() -> None:
    """For a large batch, the schedule allows no proposals. A later step catches up with the drawn
    tokens.
    """
    runner = Runner()
    runner.begin("a", text(100))
    assert runner.step({"a": [110]}, num=0) == {"a": []}
    assert not runner.proposer._cursors
    runner.step({"a": [111]}, num=2)
    for token in range(112, 120):
        assert runner.step({"a": [token]}, num=0) == {"a": []}
    assert runner.step({"a": [120]}, num=2) == {"a": [121, 122]}


def test_a_cursor_that_is_far_behind_is_made_anew() -> None:
    runner = Runner()
    runner.begin("a", text(100))
    runner.step({"a": [110]})
    runner.step({"a": [7] * (MAX_BEHIND + 1)}, num=0)
    assert runner.step({"a": [110, 111, 112, 113]}) == {"a": [114, 115, 116, 117]}


def test_another_text_under_the_same_id_is_followed() -> None:
    """A shorter text replaces the old one at once. With a longer one, the first proposals may be
    worse.
    """
    runner = Runner()
    runner.begin("a", text(100))
    runner.step({"a": [110, 111]})
    runner.begin("a", text(300)[:20])
    assert runner.step({"a": [310]}) == {"a": [311, 312, 313, 314]}


def test_no_proposal_goes_beyond_the_models_last_position() -> None:
    runner = Runner(max_model_len=55)
    runner.begin("a", text(100))
    assert runner.step({"a": [110]}) == {"a": [111, 112, 113]}
    assert runner.step({"a": [111, 112, 113]}) == {"a": []}
    assert runner.step({"a": [114]}) == {"a": []}

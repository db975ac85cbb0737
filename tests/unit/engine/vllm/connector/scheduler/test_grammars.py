"""The grammar matcher of a request on vLLM starts after the tokens that other engines drew.

If token 1 is not known yet, the matcher gets that token later.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pdmesh.engine.grammars.asked_grammars import AskedGrammar, GrammarKind, grammar_of
from pdmesh.engine.grammars.vocabulary import load_vocabulary
from pdmesh.engine.sim.vocabulary import EOS_ID
from pdmesh.engine.sim_tokenizer import write_sim_model
from pdmesh.engine.vllm.connector.scheduler.grammars import Grammars, drawing_of, has_failed
from pdmesh.engine.vllm.host.sampling import BEGINS_AFTER
from pdmesh.engine.vllm.sampling_extras import NUM_DRAWN

pytest.importorskip("xgrammar")  # xgrammar is a dependency of vLLM
torch = pytest.importorskip("torch")

GRAMMAR = grammar_of(AskedGrammar(GrammarKind.CHOICE, json.dumps(["time water", "time", "over"])))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_sim_model(folder)
    return folder


def request(prompt: list[int], num_drawn: int = 0, **extra: Any) -> Any:
    is_early = extra.pop("is_early", False)
    params = SimpleNamespace(
        structured_outputs=SimpleNamespace(grammar=GRAMMAR),
        extra_args={NUM_DRAWN: num_drawn, **extra} if num_drawn or extra else None,
    )
    transfer = {"is_early": True} if is_early else None
    return SimpleNamespace(
        sampling_params=params, prompt_token_ids=prompt, kv_transfer_params=transfer
    )


def test_a_matcher_continues_after_the_drawn_tokens(model: Path) -> None:
    backend, tokens = Grammars(model, 0), load_vocabulary(model, 0).tokenize_str("time water")
    for num_drawn in range(len(tokens) + 1):
        drawing = drawing_of(backend, request([9, 9, *tokens[:num_drawn]], num_drawn))
        assert drawing.validate_tokens(tokens[num_drawn:]) == tokens[num_drawn:]
        assert drawing.accept_tokens("r", [*tokens[num_drawn:], EOS_ID])
        drawing.rollback(2)
        assert drawing.accept_tokens("r", [tokens[-1]])
        assert not drawing.accept_tokens("r", [tokens[0]])


def test_tokens_that_cannot_have_been_drawn_fail_the_request(model: Path) -> None:
    """The request fails at its next token. So the host learns that the constraint is the cause."""
    wrong = load_vocabulary(model, 0).tokenize_str("water")
    drawing = drawing_of(Grammars(model, 0), request(wrong, len(wrong)))
    mask = torch.zeros((1, 4), dtype=torch.int32)
    drawing.fill_bitmask(mask, 0)
    assert mask.eq(-1).all(), "a row of zeros would allow no token at all"
    assert drawing.validate_tokens(wrong) == []
    assert not drawing.accept_tokens("r", wrong)
    assert has_failed(ended(drawing))


def test_a_refused_token_means_that_the_constraint_failed_the_request(model: Path) -> None:
    tokens = load_vocabulary(model, 0).tokenize_str("time water")
    drawing = drawing_of(Grammars(model, 0), request([9, 9]))
    assert not drawing.accept_tokens("r", tokens[1:]), "a draft"
    drawing = drawing_of(Grammars(model, 0), request([9, 9]))
    assert drawing.accept_tokens("r", tokens[:1])
    assert not has_failed(ended(drawing))
    assert not drawing.accept_tokens("r", tokens[:1])
    assert has_failed(ended(drawing))
    assert not has_failed(SimpleNamespace(structured_output_request=None))
    assert not has_failed(ended(None)), "it is still being compiled"


def ended(grammar: Any) -> Any:
    return SimpleNamespace(structured_output_request=SimpleNamespace(grammar=grammar))


def test_while_token_1_is_missing_its_stand_in_is_not_taken_as_drawn(model: Path) -> None:
    tokens = load_vocabulary(model, 0).tokenize_str("over")
    stand_in = 0
    drawing = drawing_of(Grammars(model, 0), request([9, stand_in], 1, is_early=True))
    assert drawing.awaits_first_token
    assert drawing.accept_tokens("r", tokens)


def test_the_constraint_may_begin_within_the_drawn_tokens(model: Path) -> None:
    tokens = load_vocabulary(model, 0).tokenize_str("over")
    backend, marker = Grammars(model, 0), [5, 6]
    for drawn in ([], [7], [7, 5], [7, 5, 6], [7, 5, 6, *tokens]):
        drawing = drawing_of(backend, request([9, *drawn], len(drawn), **{BEGINS_AFTER: marker}))
        rest = [7, 5, 6, *tokens][len(drawn) :]
        assert drawing.accept_tokens("r", rest)
        assert not drawing.accept_tokens("r", [7])

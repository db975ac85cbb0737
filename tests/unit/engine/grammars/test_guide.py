"""A guide says which tokens an answer may continue with.

The allowed tokens depend on the answer only, even if another engine drew its beginning.
"""

from __future__ import annotations

import json

import pytest

from pdmesh.core.sampling.constraint import Constraint
from pdmesh.engine.grammars.asked_grammars import AskedGrammar, GrammarKind, grammar_of
from pdmesh.engine.grammars.compiler import GrammarCompiler, GrammarRefused
from pdmesh.engine.grammars.guide import Guide
from pdmesh.engine.sim.constraints.tokenizer import sim_vocabulary
from pdmesh.engine.sim.vocabulary import EOS_ID

COMPILER = GrammarCompiler(sim_vocabulary)
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["time", 7]}}, "required": ["a"]}
OBJECT = Constraint(grammar_of(AskedGrammar(GrammarKind.JSON, json.dumps(SCHEMA))))
ANSWER = [*COMPILER.vocabulary.tokenize_str('{ "a": "time"}'), EOS_ID]


def mask(guide: Guide) -> bytes | None:
    return None if guide.is_free else guide.matcher.compute_bitmask()


def test_a_guide_that_continues_an_answer_allows_the_same_tokens() -> None:
    for marker in ((), (5, 9)):
        constraint = Constraint(OBJECT.grammar, marker)
        answer = [5, 9, 5, *ANSWER] if marker == () else [7, 5, 5, 9, *ANSWER]
        answer = answer[3:] if marker == () else answer
        whole = Guide.after(constraint, COMPILER, ())
        for num_drawn, token_id in enumerate(answer):
            later = Guide.after(constraint, COMPILER, answer[:num_drawn])
            assert mask(later) == mask(whole), num_drawn
            assert later.num_valid(answer[num_drawn:]) in (
                len(answer) - num_drawn,
                len(answer) - num_drawn - 1,  # the engine may have to draw the end itself
            )
            assert whole.accept([token_id])


def test_giving_tokens_back_restores_the_earlier_state() -> None:
    constraint = Constraint(OBJECT.grammar, (5,))
    answer = [9, 5, *ANSWER]
    guide = Guide.after(constraint, COMPILER, ())
    masks = []
    for token_id in answer:
        masks.append(mask(guide))
        assert guide.accept([token_id])
    assert guide.is_free, "the grammar has ended"
    for num_back in range(1, len(answer) + 1):
        guide.give_back(num_back)
        assert mask(guide) == masks[-num_back], num_back
        assert guide.accept(answer[-num_back:])


def test_tokens_that_a_constraint_does_not_allow_are_not_accepted() -> None:
    wrong = COMPILER.vocabulary.tokenize_str('{"b')
    guide = Guide.after(OBJECT, COMPILER, wrong[:2])
    assert guide.num_valid(wrong[2:]) == 0
    assert not guide.accept(wrong[2:])
    assert not guide.accept([EOS_ID]), "the guide accepts nothing after a refusal"
    with pytest.raises(GrammarRefused):
        Guide.after(OBJECT, COMPILER, wrong)


def test_free_tokens_may_all_be_proposed() -> None:
    guide = Guide.after(Constraint(OBJECT.grammar, (5,)), COMPILER, ())
    assert guide.num_valid([1, 2, 3]) == 3
    assert guide.num_valid([1, 5, ANSWER[0], 5]) == 3
    assert guide.is_free, "a proposal does not change the guide"

"""The process that compiles grammars for a gateway answers its frames in order."""

from __future__ import annotations

import io

import msgspec
import pytest

from pdmesh.engine.grammars import checker
from pdmesh.engine.grammars.asked_grammars import AskedGrammar, GrammarKind
from pdmesh.engine.grammars.checker import (
    FRAME,
    MAX_VOCABULARIES,
    Check,
    Checked,
    LoadVocabulary,
    serve,
)
from pdmesh.engine.sim.constraints.tokenizer import build_tokenizer
from pdmesh.engine.sim.vocabulary import EOS_ID


@pytest.fixture(autouse=True)
def unbound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the checker from limiting the CPU time of the test's own process."""
    monkeypatch.setattr(checker, "_bound_cpu", lambda: None)
    monkeypatch.setattr(checker, "_unbound_cpu", lambda: None)


def test_each_check_gets_its_answer_by_the_vocabulary_that_it_names() -> None:
    tokenizer = msgspec.Raw(build_tokenizer().to_str().encode())
    frames: list[LoadVocabulary | Check] = [
        LoadVocabulary(1, tokenizer, 0, EOS_ID),
        LoadVocabulary(2, tokenizer, 0, -1),
        Check(1, AskedGrammar(GrammarKind.REGEX, "[0-9]+")),
        Check(1, AskedGrammar(GrammarKind.REGEX, "(")),
        Check(2, AskedGrammar(GrammarKind.REGEX, "a")),
        Check(3, AskedGrammar(GrammarKind.REGEX, "a")),
        *(LoadVocabulary(10 + n, tokenizer, 0, EOS_ID) for n in range(MAX_VOCABULARIES - 1)),
        Check(2, AskedGrammar(GrammarKind.REGEX, "a")),
        Check(1, AskedGrammar(GrammarKind.JSON, '{"type": "integer"}')),
    ]
    bodies = [msgspec.json.encode(frame) for frame in frames]
    answers = io.BytesIO()
    serve(io.BytesIO(b"".join(FRAME.pack(len(body)) + body for body in bodies)), answers)
    answers.seek(0)
    got = []
    while head := answers.read(FRAME.size):
        got.append(msgspec.json.decode(answers.read(FRAME.unpack(head)[0]), type=Checked))
    got = [each for frame, each in zip(frames, got, strict=True) if isinstance(frame, Check)]
    assert [bool(each.grammar) for each in got] == [True, False, False, False, False, False]
    assert [bool(each.refusal) for each in got] == [False, True, True, False, True, False]
    assert [each.is_unknown for each in got] == [False, False, False, True, False, True]

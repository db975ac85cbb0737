"""A model's tokens, end token and number of logits are read from its files."""

from __future__ import annotations

import json
from pathlib import Path

from llguidance import LLMatcher

from pdmesh.engine.grammars.vocabulary import added_tokens, load_vocabulary, vocabulary_of
from pdmesh.engine.sim.constraints.tokenizer import build_tokenizer
from pdmesh.engine.sim.vocabulary import EOS_ID, build_vocabulary
from pdmesh.engine.sim_tokenizer import write_sim_model


def test_the_vocabulary_has_the_tokens_and_the_end_token_of_the_model(tmp_path: Path) -> None:
    write_sim_model(tmp_path)
    vocabulary = load_vocabulary(tmp_path, 0)
    assert vocabulary.eos_token == EOS_ID
    assert vocabulary.vocab_size == build_vocabulary().size
    assert vocabulary.decode_str(vocabulary.tokenize_str("über")) == "über"
    assert load_vocabulary(tmp_path, 1000).vocab_size == 1000, (
        "a model may have more logits than tokens"
    )


def test_if_the_tokenizer_names_no_end_token_the_one_of_the_model_counts(tmp_path: Path) -> None:
    write_sim_model(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    assert load_vocabulary(tmp_path, 0).eos_token == 1


def test_a_token_in_angle_brackets_is_text_unless_the_tokenizer_calls_it_special() -> None:
    """Qwen's <tool_call> is an ordinary token. A grammar that contains its text must accept the
    token.
    """
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["<tool_call>"])
    tokenizer.add_special_tokens(["<|end|>"])
    text, ids = tokenizer.to_str(), tokenizer.get_vocab()
    vocabulary = vocabulary_of(text, 0, EOS_ID)
    assert added_tokens(text)["<tool_call>"] == ids["<tool_call>"]
    for mark, is_text in (("<tool_call>", True), ("<|end|>", False)):
        matcher = LLMatcher(vocabulary, f'%llguidance {{}}\nstart: "{mark}" /[a-z]+/\n')
        assert matcher.consume_token(ids[mark]) == is_text
    padded = LLMatcher(vocabulary_of(text, 1000, EOS_ID), "%llguidance {}\nstart: /(?s:.*)/\n")
    assert not any(padded.compute_logit_bias()[max(ids.values()) + 1 :]), "no such tokens"

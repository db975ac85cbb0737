"""A model's files say what its tokens are, which one ends a text, and how many logits it has."""

from __future__ import annotations

import json
from pathlib import Path

from pdmesh.engine.grammars.vocabulary import load_vocabulary
from pdmesh.engine.sim.vocabulary import EOS_ID, build_vocabulary
from pdmesh.engine.sim_tokenizer import write_sim_model


def test_a_models_tokens_and_its_end(tmp_path: Path) -> None:
    write_sim_model(tmp_path)
    vocabulary = load_vocabulary(tmp_path, 0)
    assert vocabulary.eos_token == EOS_ID
    assert vocabulary.vocab_size == build_vocabulary().size
    assert vocabulary.decode_str(vocabulary.tokenize_str("über")) == "über"
    assert load_vocabulary(tmp_path, 1000).vocab_size == 1000, "logits may be padded"


def test_without_the_tokenizers_own_word_the_models_counts(tmp_path: Path) -> None:
    write_sim_model(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    assert load_vocabulary(tmp_path, 0).eos_token == 1

import json
from pathlib import Path

from tokenizers import Tokenizer

from pdmesh.engine.base import Sampling
from pdmesh.engine.sim.constraints.tokenizer import build_tokenizer
from pdmesh.engine.sim.model import SimParams
from pdmesh.engine.sim.vocabulary import EOS_ID, SPECIALS, build_vocabulary
from pdmesh.engine.sim_tokenizer import write_sim_model
from tests.support.sim_reference import sim_reference


def test_any_text_comes_back_from_its_tokens() -> None:
    tokenizer = build_tokenizer()
    for text in (
        "What is the capital of France?",
        "déjà vu 日本語 🙂\n\ttabs",
        "  two  spaces ",
        "",
    ):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_each_word_of_the_sim_is_one_token_and_encodes_to_itself() -> None:
    tokenizer, vocabulary = build_tokenizer(), build_vocabulary()
    for token in vocabulary.drawable:
        if token not in vocabulary.follow:
            assert tokenizer.encode(tokenizer.decode([token])).ids == [token]


def test_ids_of_the_vocabulary_and_the_tokenizer_agree() -> None:
    tokenizer = build_tokenizer()
    assert tokenizer.get_vocab_size() == build_vocabulary().size
    assert [tokenizer.id_to_token(n) for n in range(3)] == list(SPECIALS)
    assert tokenizer.id_to_token(EOS_ID) == "<|im_end|>"


def test_long_output_is_text_and_splits_some_characters_over_two_tokens() -> None:
    tokenizer = build_tokenizer()
    sampling = Sampling(max_tokens=2000, ignore_eos=True)
    tokens, _ = sim_reference([5, 6, 7], sampling, SimParams())
    follow = build_vocabulary().follow
    assert sum(token in follow for token in tokens) > 20
    text = tokenizer.decode(tokens)
    assert "\ufffd" not in text.rstrip("\ufffd")  # max_tokens may cut the last character in half
    assert sum(c.isascii() for c in text) > 0.8 * len(text)


def test_the_folder_holds_the_files_that_a_loader_of_chat_models_needs(tmp_path: Path) -> None:
    write_sim_model(tmp_path / "sim")
    loaded = Tokenizer.from_file(str(tmp_path / "sim" / "tokenizer.json"))
    assert loaded.encode("<|im_start|>user\nhi<|im_end|>").ids[0] == 1
    config = json.loads((tmp_path / "sim" / "tokenizer_config.json").read_text())
    assert config["eos_token"] == "<|im_end|>"
    assert "add_generation_prompt" in config["chat_template"]

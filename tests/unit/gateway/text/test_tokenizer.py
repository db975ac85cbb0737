"""A tokenizer encodes text, and decodes tokens to whole characters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.services.gateway.text.section_cache import SectionCache
from pdmesh.services.gateway.text.text_stream import TextRules
from pdmesh.services.gateway.text.tokenizer import BadModelDir, Tokenizer
from tests.fakes.tiny_model import EOS, write_tiny_model


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = write_tiny_model(tmp_path_factory.mktemp("tiny"))
    return Tokenizer.load(directory, max_chars=10_000)


@pytest.mark.fault("F32")
@given(text=st.text(max_size=40), cuts=st.lists(st.integers(1, 5), max_size=60))
def test_text_survives_any_split_into_tokens(
    tokenizer: Tokenizer, text: str, cuts: list[int]
) -> None:
    """The tiny tokenizer splits each character outside ASCII into several tokens."""
    text = text.replace("\ufffd", "?")
    ids = list(tokenizer._encode(text, add_special_tokens=False))
    stream = tokenizer.text_stream(())
    shown, sizes = "", iter(cuts)
    while ids:
        size = next(sizes, 1)
        shown += stream.feed(ids[:size])
        assert text.startswith(shown), "never an incomplete character"
        ids = ids[size:]
    assert shown + stream.finish() == text


async def test_an_incomplete_character_at_the_end_is_not_shown(tokenizer: Tokenizer) -> None:
    ids = await tokenizer.encode("a\N{SNOWMAN}", add_special_tokens=False)
    stream = tokenizer.text_stream(())
    assert stream.feed(list(ids[:-1])[:1]) == "a"
    assert stream.feed([ids[1]]) == ""
    assert stream.finish() == ""


async def test_a_stop_string_over_several_tokens_is_cut_and_its_tokens_counted(
    tokenizer: Tokenizer,
) -> None:
    ids = list(await tokenizer.encode("one END two", add_special_tokens=False))
    stream = tokenizer.text_stream((), TextRules(("END", "two")))
    assert stream.feed(ids[:5]) == "one "
    assert not stream.is_stopped
    assert stream.feed(ids[5:]) == ""
    assert stream.is_stopped
    assert stream.num_tokens == 7
    assert stream.finish() == ""


def test_special_tokens_have_no_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.eos_token_ids == {EOS}
    assert tokenizer.text_stream(()).feed([EOS]) == ""
    assert tokenizer.token_bytes(EOS) == b"<eos>"


async def test_long_text_is_encoded_alike_off_the_loop(tokenizer: Tokenizer) -> None:
    text = "word " * 1000
    assert await tokenizer.encode(text, add_special_tokens=False) == tokenizer._encode(
        text, add_special_tokens=False
    )


@given(turns=st.lists(st.text(max_size=1500), min_size=1, max_size=6))
async def test_a_chat_that_grows_is_encoded_as_if_each_turn_were_its_first(
    tmp_path_factory: pytest.TempPathFactory, turns: list[str]
) -> None:
    """The texts between special tokens are long or short, and may contain the name of a special
    token.
    """
    template = "{% for m in messages %}<eos>{{ m['content'] }}{% endfor %}"
    sections = SectionCache(1 << 20)
    directory = write_tiny_model(tmp_path_factory.mktemp("chats"), template)
    tokenizer = Tokenizer.load(directory, max_chars=1 << 20, sections=sections)
    text = "".join(f"<eos>{turn}" * 3 for turn in turns).replace("\ufffd", "?")
    for end in range(0, len(text), 900):
        got = await tokenizer.encode(text[:end], add_special_tokens=False, owner="tenant")
        assert got == tokenizer._encode(text[:end], add_special_tokens=False)


async def test_the_next_turn_of_a_long_chat_is_encoded_from_the_last_one_on(
    tmp_path: Path,
) -> None:
    sections = SectionCache(1 << 20)
    template = "{% for m in messages %}<eos>{{ m['content'] }}{% endfor %}"
    tokenizer = Tokenizer.load(
        write_tiny_model(tmp_path, template), max_chars=1 << 20, sections=sections
    )
    chat = "<eos>".join(["word " * 500] * 20)
    await tokenizer.encode(chat, add_special_tokens=False, owner="tenant")
    before = sections.num_encoded_tokens
    await tokenizer.encode(f"{chat}<eos>more", add_special_tokens=False, owner="tenant")
    assert sections.num_encoded_tokens - before < before / 10
    # Other tenants and texts that are not chats reuse nothing.
    await tokenizer.encode(chat, add_special_tokens=False, owner="another")
    assert sections.num_encoded_tokens - before > before
    reused = sections.num_reused_tokens
    await tokenizer.encode(chat, add_special_tokens=False)
    await tokenizer.encode(chat, add_special_tokens=True, owner="tenant")
    assert sections.num_reused_tokens == reused


def test_a_directory_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(BadModelDir, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path, max_chars=100)


def test_a_template_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% unknown %}")
    with pytest.raises(BadModelDir, match="chat template"):
        Tokenizer.load(tmp_path, max_chars=100)


@pytest.mark.parametrize("named", [3, [3, 4]])
def test_the_end_token_of_the_tokenizer_ends_an_answer_too(tmp_path: Path, named: object) -> None:
    """The chat's EOS still ends an answer if generation_config names only the base model's EOS."""
    write_tiny_model(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    others = set(named) if isinstance(named, list) else {named}
    assert Tokenizer.load(tmp_path, max_chars=100).eos_token_ids == {EOS} | others


def test_the_json_of_a_tokenizer_is_that_of_its_file(tmp_path: Path) -> None:
    """The library would generate the JSON again, and hold the interpreter's lock for that time."""
    directory = write_tiny_model(tmp_path)
    path = directory / "tokenizer.json"
    text = json.dumps(json.loads(path.read_text()), indent=7)
    path.write_text(text)
    tokenizer = Tokenizer.load(directory, max_chars=1000)
    path.unlink()
    assert tokenizer.to_json() == text

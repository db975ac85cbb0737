"""Text in, tokens out, and whole characters back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.errors import InvalidRequest
from pdmesh.services.gateway.text.chat_template import ChatTemplate
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
    """The tiny tokenizer splits every character that is not ASCII over several tokens."""
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


def test_a_directory_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(BadModelDir, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path, max_chars=100)


def test_a_template_is_bounded_and_sandboxed() -> None:
    def render(source: str) -> str:
        return ChatTemplate(source, {"eos_token": "</s>"}, 1000).render(
            [{"role": "user", "content": "x"}]
        )

    assert render("{{ eos_token }}{{ messages | tojson }}") == (
        '</s>[{"role": "user", "content": "x"}]'
    )
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    for source in (
        "{% for i in range(100000) %}xxxxxxxxxx{% endfor %}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ raise_exception('no such role') }}",
        "{{ 1 / 0 }}",
    ):
        with pytest.raises(InvalidRequest) as caught:
            render(source)
        assert caught.value.field == "messages"


TEXT_ONLY = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] + '|' }}{% endfor %}"
PARTS_ONLY = (
    "{% for m in messages %}<{{ m['role'] }}>{% for part in m['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] + '|' }}{% endif %}{% endfor %}{% endfor %}"
)
EITHER = (
    "{% for m in messages %}<{{ m['role'] }}>{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for part in m['content'] %}{{ part.text }}{% endfor %}{% endif %}|{% endfor %}"
)
SHOWN_AS_IT_IS = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}|{% endfor %}"


def rendered(source: str, *contents: str | Sequence[str]) -> str:
    return ChatTemplate(source, {}, 1000).render([{"role": "user", "content": c} for c in contents])


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (TEXT_ONLY, "<user>x|<user>a\nb|<user>|"),
        (SHOWN_AS_IT_IS, "<user>x|<user>a\nb|<user>|"),
        (PARTS_ONLY, "<user>x|<user>a|b|<user>"),
        (EITHER, "<user>x|<user>ab|<user>|"),
    ],
)
def test_a_template_gets_contents_in_the_form_that_it_reads(source: str, expected: str) -> None:
    """As plain vLLM: parts where the template reads parts, else lines of one text."""
    assert rendered(source, "x", ["a", "b"], []) == expected


def test_a_template_that_refuses_to_be_tried_gets_text() -> None:
    source = "{% if messages[0]['content'] != 'x' %}{{ raise_exception('no') }}{% endif %}ok"
    assert rendered(source, "x") == "ok"


@pytest.mark.parametrize(
    "source",
    [
        "{% if tools is not none or documents is not none %}tools!{% endif %}x",
        "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}{% endfor %}",
        (
            "{{ messages[0]['content'] | tojson(separators=(',', ':'), sort_keys=true) | "
            "replace('\"', '') }}"
        ),
    ],
)
def test_a_template_finds_what_transformers_gives_it(source: str) -> None:
    assert rendered(source, "x") == "x"


def test_a_template_may_name_who_speaks() -> None:
    source = "{% for m in messages %}{{ m.get('name', m['role']) }}: {{ m['content'] }}{% endfor %}"
    messages = [{"role": "user", "name": "ann", "content": "x"}]
    assert ChatTemplate(source, {}, 1000).render(messages) == "ann: x"


@pytest.mark.parametrize(
    ("known", "expected"),
    [("'developer'", "developer"), ('"developer"', "developer"), ("", "system")],
)
def test_a_developer_is_system_to_a_template_that_does_not_know_it(
    known: str, expected: str
) -> None:
    source = "{{ messages[0]['role'] }}{# " + known + " #}"
    template = ChatTemplate(source, {}, 1000)
    assert template.render([{"role": "developer", "content": "x"}]) == expected


def test_a_template_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% unknown %}")
    with pytest.raises(BadModelDir, match="chat template"):
        Tokenizer.load(tmp_path, max_chars=100)


@pytest.mark.parametrize("named", [3, [3, 4]])
def test_the_tokenizers_own_end_ends_an_answer_too(tmp_path: Path, named: object) -> None:
    """A generation_config that names the base model's end alone does not take the chat's away."""
    write_tiny_model(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    others = set(named) if isinstance(named, list) else {named}
    assert Tokenizer.load(tmp_path, max_chars=100).eos_token_ids == {EOS} | others

"""A conversation becomes the same prompt as in plain vLLM."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pdmesh.errors import InvalidRequest
from pdmesh.services.gateway.text.chat_template import (
    DEFAULT,
    WITH_TOOLS,
    ChatTemplate,
    ChatTemplates,
    Conversation,
    ImageMark,
    Message,
)


def test_a_template_is_bounded_and_sandboxed() -> None:
    def render(source: str) -> str:
        template = ChatTemplate(source, {"eos_token": "</s>"}, 1000)
        return template.render(Conversation([{"role": "user", "content": "x"}]))

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
    messages = [{"role": "user", "content": c} for c in contents]
    return ChatTemplate(source, {}, 1000).render(Conversation(messages))


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
    """As in plain vLLM, a template that reads parts gets parts. Other templates get one text with a
    line for each part.
    """
    assert rendered(source, "x", ["a", "b"], []) == expected


def test_a_template_that_fails_when_it_is_probed_gets_text() -> None:
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


def test_a_template_may_show_the_name_of_the_speaker() -> None:
    source = "{% for m in messages %}{{ m.get('name', m['role']) }}: {{ m['content'] }}{% endfor %}"
    messages = [{"role": "user", "name": "ann", "content": "x"}]
    assert ChatTemplate(source, {}, 1000).render(Conversation(messages)) == "ann: x"


@pytest.mark.parametrize(
    ("known", "expected"),
    [("'developer'", "developer"), ('"developer"', "developer"), ("", "system")],
)
def test_a_developer_is_system_to_a_template_that_does_not_know_it(
    known: str, expected: str
) -> None:
    source = "{{ messages[0]['role'] }}{# " + known + " #}"
    template = ChatTemplate(source, {}, 1000)
    assert template.render(Conversation([{"role": "developer", "content": "x"}])) == expected


def test_system_and_developer_messages_become_one_system_message() -> None:
    source = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    messages: list[Message] = [
        {"role": "user", "content": "x"},
        {"role": "developer", "content": ["a", "b"]},
        {"role": "system", "content": "c"},
    ]
    template = ChatTemplate(source, {}, 1000)
    assert template.render(Conversation(messages)) == "<system>a\nb\n\nc<user>x"
    alone = Conversation([messages[0], messages[2]])
    assert template.render(alone) == "<user>x<system>c", (
        "the order of the client's messages is kept"
    )


def test_the_result_of_a_tool_is_text_to_a_template_that_reads_parts() -> None:
    source = PARTS_ONLY.replace(
        "{% for part", "{{ m['content'] if m['role'] == 'tool' }}{% for part"
    )
    messages: list[Message] = [{"role": "tool", "content": ["a", "b"], "tool_call_id": "1"}]
    assert ChatTemplate(source, {}, 1000).render(Conversation(messages)) == "<tool>a\nb"


def test_a_template_gets_the_client_variables_that_it_reads_but_no_reserved_ones() -> None:
    source = "{{ thinking }} {{ strftime_now('x') }} {{ messages[0]['content'] }}"
    given = {"thinking": True, "strftime_now": 1, "messages": [], "other": 2}
    conversation = Conversation([{"role": "user", "content": "c"}], variables=given)
    assert ChatTemplate(source, {}, 1000).render(conversation) == "True x c"


def test_a_model_may_have_a_template_for_tools() -> None:
    sources = {DEFAULT: "plain", WITH_TOOLS: "{{ tools | tojson }}"}
    templates = ChatTemplates.of(sources, {}, 1000)
    messages: list[Message] = [{"role": "user", "content": "c"}]
    assert templates.render(Conversation(messages)) == "plain"
    assert templates.render(Conversation(messages, [{"a": 1}])) == '[{"a": 1}]'


def test_a_template_that_recurses_too_deeply_leads_to_a_refusal() -> None:
    deep: object = 1
    for _ in range(100_000):
        deep = [deep]
    conversation = Conversation([{"role": "user", "content": "c"}], variables={"v": deep})
    with pytest.raises(InvalidRequest):
        ChatTemplate("{{ v | tojson }}", {}, 1000).render(conversation)


@pytest.mark.req("S128")
@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "<image>\n<image>\na\nb"),
        ("{% for p in messages[0].content %}{{ p.text or '<img>' }}{% endfor %}",
         "a<img>b<img>"),
    ],
)  # fmt: skip
def test_images_are_parts_or_come_before_the_text(source: str, expected: str) -> None:
    """As in plain vLLM, the placeholders are put before the text if the template does not read
    parts.
    """
    content = ["a", ImageMark("<image>"), "b", ImageMark("<image>")]
    template = ChatTemplate(source, {}, 1000)
    assert template.render(Conversation([{"role": "user", "content": content}])) == expected

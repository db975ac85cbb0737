"""Prompts of conversations with tools equal those of plain vLLM's renderer.

The templates handle tools, calls and results in different ways, like the templates of real models.
"""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest

from pdmesh.errors import InvalidRequest
from pdmesh.services.gateway.openai.calls import conversation_of
from pdmesh.services.gateway.openai.schema import parse_chat
from pdmesh.services.gateway.text.tokenizer import Tokenizer
from tests.fakes.tiny_model import write_tiny_model

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("vllm")
pytestmark = pytest.mark.filterwarnings("ignore")  # importing vLLM raises warnings

# As in Hermes and Qwen: tools as JSON lines, contents as text, results joined in one user turn.
HERMES: Final = """
{%- if tools %}<|im_start|>system
{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}{% endif %}
{% for tool in tools %}
{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls %}<|im_start|>assistant
{%- if message.content %}{{ '\\n' + message.content }}{% endif %}
{%- for tool_call in message.tool_calls %}
{%- if tool_call.function is defined %}{% set tool_call = tool_call.function %}{% endif %}
<tool_call>
{"name": "{{ tool_call.name }}", "arguments": {{ tool_call.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ message.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
{%- else %}<|im_start|>{{ message.role + '\\n' + message.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""
# As in Llama 3: indented JSON, a date, one call per message, contents in parts.
LLAMA: Final = """
{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = '26 Jul 2024' %}{% endif %}
{{- date_string }}
{%- if tools is not none %}{% for t in tools %}{{ t | tojson(indent=4) }}{% endfor %}{% endif %}
{%- for message in messages %}
{%- if 'tool_calls' in message %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('one call at once!') }}{% endif %}
{%- set call = message.tool_calls[0].function %}
{{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}<|eot_id|>' }}
{%- elif message.role == 'tool' or message.role == 'ipython' %}
{{- '<ipython>' + message.content }}
{%- else %}{{ '<' + message.role + '>' }}
{%- for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}
{%- endfor %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""
# As in Mistral: all calls in one list with their ids, and a filter over the messages.
MISTRAL: Final = """
{%- set user_messages = messages | selectattr('role', 'equalto', 'user') | list %}
{%- if tools is defined and tools %}[AVAILABLE_TOOLS]{% for tool in tools %}
{%- set tool = tool.function %}{%- for key, val in tool.items() if key != 'return' %}
{{- key }}={% if val is string %}{{ val }}{% else %}{{ val | tojson }}{% endif %};
{%- endfor %}{% endfor %}[/AVAILABLE_TOOLS]{% endif %}
{%- for message in messages %}
{%- if message['tool_calls'] is defined and message['tool_calls'] %}[TOOL_CALLS][
{%- for tool_call in message.tool_calls %}{% set out = tool_call.function | tojson %}
{{- out[:-1] + ', "id": "' + tool_call.id + '"}' }}{% if not loop.last %}, {% endif %}
{%- endfor %}]</s>
{%- elif message['role'] == 'tool' %}[TOOL_RESULTS]{"content": {{ message.content | string }},
{{- ' "call_id": "' + message.tool_call_id + '"}' }}
{%- else %}[{{ message['role'] }}]{{ message['content'] }}
{%- if message['name'] %} {{ message['name'] }}{% endif %}
{%- endif %}{% endfor %}{{ user_messages | length }}"""
# As in DeepSeek and Qwen 3: the reasoning before the last question is left out.
THINKING: Final = """
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}<{{ message.role }}>
{%- if message.content is string %}{% set content = message.content %}
{%- else %}{% set content = '' %}{% endif %}
{%- if message.reasoning_content is string and loop.index0 > ns.last %}<think>
{{- message.reasoning_content }}</think>{% endif %}
{{- content }}
{%- for call in message.tool_calls or [] %}<call>{{ call | tojson }}</call>{% endfor %}
{%- endfor %}
{%- if add_generation_prompt %}<assistant>
{%- if reasoning_effort is defined %}{{ reasoning_effort }}{% endif %}
{%- if enable_thinking is not defined or enable_thinking %}<think>{% endif %}{% endif %}"""
TEMPLATES: Final = {"hermes": HERMES, "llama": LLAMA, "mistral": MISTRAL, "thinking": THINKING}

WEATHER: Final = {
    "type": "function",
    "function": {
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"town": {"type": "string", "enum": ["Köln", "<b>"]}, "at": {}},
            "required": ["town"],
        },
        "name": "weather",
        "description": "What the weather is.\nNow.",
    },
}
BARE: Final = {"function": {"name": "bare"}}


def called(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"type": "function", "id": call_id, "function": {"name": name, "arguments": arguments}}


def text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


ASKED: Final[list[dict[str, Any]]] = [
    {"role": "user", "content": "Weather in Köln?"},
    {"role": "assistant", "content": None,
     "tool_calls": [called("c00000001", "weather", '{"town": "Köln", "at": [1, 2.50]}')]},
    {"role": "tool", "tool_call_id": "c00000001", "content": "12 °C"},
]  # fmt: skip
CASES: Final[dict[str, dict[str, Any]]] = {
    "tools": {"messages": ASKED[:1], "tools": [WEATHER, BARE]},
    "tools that may not be called": {
        "messages": ASKED[:1], "tools": [WEATHER], "tool_choice": "none"},
    "a call and its result": {"messages": ASKED, "tools": [WEATHER]},
    "no tools any more": {"messages": [*ASKED, {"role": "assistant", "content": "Cold."}]},
    "a result of parts": {
        "messages": [*ASKED[:2], {"role": "tool", "tool_call_id": "c00000001", "name": "weather",
                                  "content": [text_part("12"), text_part("cloudy")]}]},
    "text beside a call": {
        "messages": [ASKED[0], {**ASKED[1], "content": "Let me look."}, ASKED[2]]},
    "arguments that are no object": {
        "messages": [{**ASKED[0], "name": "ann"}, {"role": "assistant", "content": "",
                     "tool_calls": [called("c00000001", "weather", '[1]')]}]},
    "arguments that are no JSON": {
        "messages": [ASKED[0], {"role": "assistant",
                     "tool_calls": [called("c00000001", "weather", '{"town"')]}]},
    "several calls": {
        "messages": [ASKED[0], {"role": "assistant", "tool_calls": [
            called("c00000001", "weather", '{"town": "<b>"}'), called("c00000002", "bare", "")]},
            ASKED[2], {"role": "tool", "tool_call_id": "c00000002", "content": "ok"}],
        "tools": [WEATHER, BARE]},
    "no calls after all": {
        "messages": [ASKED[0], {"role": "assistant", "content": "No.", "tool_calls": []}]},
    "reasoning": {
        "messages": [*ASKED[:1], {**ASKED[1], "reasoning_content": "I look it up."}, ASKED[2]],
        "tools": [WEATHER], "reasoning_effort": "high"},
    "reasoning of before": {
        "messages": [*ASKED, {"role": "assistant", "reasoning": "So.", "content": "Cold."},
                     {"role": "user", "content": [text_part("And"), text_part("Bonn?")]}],
        "chat_template_kwargs": {"enable_thinking": False, "unread": 1}},
    "no effort": {"messages": ASKED[:1], "reasoning_effort": "none"},
    "an effort beside variables": {
        "messages": ASKED[:1], "reasoning_effort": "low",
        "chat_template_kwargs": {"enable_thinking": False, "date_string": "1 May 2030"}},
    "a developer among systems": {
        "messages": [{"role": "system", "content": "A"}, ASKED[0],
                     {"role": "developer", "content": [text_part("B"), text_part("C")]}],
        "tools": [BARE]},
    "no generation prompt": {"messages": ASKED[:1], "add_generation_prompt": False},
    "a message to continue": {
        "messages": [ASKED[0], {"role": "assistant", "content": "It is "}],
        "add_generation_prompt": False, "continue_final_message": True},
    "parts to continue": {
        "messages": [{"role": "user", "content": [text_part("One"), text_part("Two")]}],
        "tools": [BARE], "add_generation_prompt": False, "continue_final_message": True},
    "a billing line": {
        "messages": [{"role": "system", "content": "x-anthropic-billing-header: 1\nBe kind."},
                     ASKED[0]]},
}  # fmt: skip


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_tiny_model(tmp_path_factory.mktemp("tiny"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "<eos>",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def of_vllm(model_dir: Path, template: str, body: dict[str, Any]) -> str:
    from transformers import PreTrainedTokenizerFast
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.renderers.chat_utils import parse_chat_messages
    from vllm.renderers.hf import resolve_chat_template_content_format, safe_apply_chat_template

    tokenizer = PreTrainedTokenizerFast.from_pretrained(model_dir)
    tokenizer.chat_template = template
    # The Any stands for the part of vLLM's configuration that its renderer reads.
    config: Any = SimpleNamespace(
        model=str(model_dir),
        tokenizer=str(model_dir),
        revision=None,
        code_revision=None,
        tokenizer_revision=None,
        trust_remote_code=False,
        multimodal_config=None,
        enable_prompt_embeds=False,
        allowed_media_domains=None,
        allowed_local_media_path="",
        hf_config=SimpleNamespace(model_type="tiny"),
    )
    request = ChatCompletionRequest.model_validate(copy.deepcopy(body))
    tools = None if request.tools is None else [tool.model_dump() for tool in request.tools]
    params = request.build_chat_params(template, "auto").with_defaults(
        {"tools": tools, "tokenize": False}
    )
    form = resolve_chat_template_content_format(
        template, tools, "auto", tokenizer, model_config=config
    )
    conversation, _, _ = parse_chat_messages(request.messages, config, form)
    return str(
        safe_apply_chat_template(
            config, tokenizer, conversation, **params.get_apply_chat_template_kwargs()
        )
    )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", TEMPLATES)
def test_a_prompt_equals_plain_vllms(model_dir: Path, family: str, case: str) -> None:
    from vllm.exceptions import VLLMValidationError

    (model_dir / "chat_template.jinja").write_text(TEMPLATES[family])
    tokenizer = Tokenizer.load(model_dir, max_chars=100_000)
    body = {"model": "m", **CASES[case]}
    request = parse_chat(json.dumps(body).encode())
    if (family, case) == ("llama", "several calls"):
        with pytest.raises(VLLMValidationError, match="one call at once"):
            of_vllm(model_dir, TEMPLATES[family], body)
        with pytest.raises(InvalidRequest, match="one call at once"):
            tokenizer.render_chat(conversation_of(request))
        return
    expected = of_vllm(model_dir, TEMPLATES[family], body)
    if (family, case) == ("llama", "a developer among systems"):
        # This template reads only parts. Plain vLLM merges the system messages into one text, which
        # such a template does not show.
        expected = expected.replace("<system>", "<system>A\n\nB\nC")
    assert tokenizer.render_chat(conversation_of(request)) == expected

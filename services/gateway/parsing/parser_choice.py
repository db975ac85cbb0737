"""Chooses which of vLLM's parsers read a model's answers, by its chat template and model type.

The template shows the model how to write a tool call and where its reasoning ends. Each entry of a
table lists marks in the templates of one model family, and the beginning of its model type. The
first entry that matches decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pdmesh.services.gateway.text.tokenizer import AnswerMarks

AUTO: Final = "auto"
NONE: Final = "none"

# Each entry has marks that must all be in the template, the beginning of the model type, and the
# name of vLLM's parser.
_TOOL_PARSERS: Final = (
    (("<\uff5cDSML\uff5c",), "", "deepseek_v32"),
    (("<\uff5ctool\u2581calls\u2581begin\uff5c>", "```json"), "", "deepseek_v3"),
    (("<\uff5ctool\u2581calls\u2581begin\uff5c>",), "", "deepseek_v31"),
    (("[TOOL_CALLS]",), "", "mistral"),
    (("<|tool_calls_section_begin|>",), "", "kimi_k2"),
    (("<minimax:tool_call>",), "", "minimax_m2"),
    (("<seed:tool_call>",), "", "seed_oss"),
    (("<|tool_call_start|>",), "lfm2", "lfm2"),
    (("<tool_call>", "<function="), "", "qwen3_coder"),
    (("<tool_call>", "<arg_key>"), "", "glm45"),
    (("<tool_call>", '"arguments"'), "", "hermes"),
    (("<|tool_call|>",), "granite", "granite"),
    (("<|python_tag|>",), "llama4", "llama4_json"),
    (('"parameters"', "<|eot"), "llama4", "llama4_pythonic"),
    (('"parameters"', "<|eot_id|>"), "llama", "llama3_json"),
)
_REASONING_PARSERS: Final = (
    (("[THINK]",), "", "mistral"),
    (("<seed:think>",), "", "seed_oss"),
    (("</think>",), "qwen3", "qwen3"),
    (("</think>",), "glm4", "glm45"),
    (("</think>",), "minimax", "minimax_m2"),
    (("</think>", "thinking"), "deepseek_v3", "deepseek_v3"),
    (("</think>", "<\uff5cAssistant\uff5c>"), "", "deepseek_r1"),
    (("</think>",), "qwen2", "deepseek_r1"),
)


@dataclass(frozen=True, slots=True)
class ParserNames:
    """The names of the parsers in vLLM. An empty name means no parser."""

    tool: str = ""
    reasoning: str = ""


def parser_names(marks: AnswerMarks, tool: str, reasoning: str) -> ParserNames:
    """The parsers to use. `tool` and `reasoning` are settings: a parser's name, auto or none."""
    return ParserNames(
        _named(tool, _TOOL_PARSERS, marks), _named(reasoning, _REASONING_PARSERS, marks)
    )


def _named(
    setting: str, table: tuple[tuple[tuple[str, ...], str, str], ...], found: AnswerMarks
) -> str:
    if setting != AUTO:
        return "" if setting == NONE else setting
    for marks, kind, name in table:
        if found.model_type.startswith(kind) and all(mark in found.template for mark in marks):
            return name
    return ""

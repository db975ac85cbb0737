"""Prints the result of a command as text, JSON or YAML, as the user asked."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import yaml
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message


def show(options: argparse.Namespace, result: Any, text: Callable[[], str]) -> None:
    """Print `result` as JSON or YAML, or else print `text()`.

    `result` is a protobuf message or JSON data.
    """
    match options.output:
        case "json":
            print(json.dumps(as_data(result), indent=2))
        case "yaml":
            print(yaml.safe_dump(as_data(result), sort_keys=False, allow_unicode=True), end="")
        case _:
            print(text())


def as_data(result: Any) -> Any:
    if isinstance(result, Message):
        return MessageToDict(result, preserving_proto_field_name=True)
    return result

"""docs/events.md lists every subject and message, with valid examples."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import pytest
from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor

from pdmesh.events.v1 import events_pb2
from pdmesh.net import subjects
from pdmesh.net.events import BINARY_KINDS

TEXT = Path("docs/events.md").read_text()
ROWS = re.findall(r"^\| `(mesh\.[^`]+)` \| `(\w+)` \| (\w+) \|", TEXT, re.MULTILINE)
MESSAGES: dict[str, Descriptor] = {
    name: message
    for name, message in events_pb2.DESCRIPTOR.message_types_by_name.items()
    if "header" in message.fields_by_name  # messages without a header are parts of events
}


def test_every_subject_is_in_the_catalogue() -> None:
    builders = [
        function
        for name, function in inspect.getmembers(subjects, inspect.isfunction)
        if not name.startswith("_")
    ]
    assert sorted(build("*") for build in builders) == sorted(
        re.sub(r"<\w+>$", "*", subject) for subject, _, _ in ROWS
    )


def test_every_message_is_in_the_catalogue_with_its_encoding() -> None:
    binary = {kind.DESCRIPTOR.name for kind in BINARY_KINDS}
    assert {name: encoding for _, name, encoding in ROWS} == {
        name: "binary" if name in binary else "JSON" for name in MESSAGES
    }


@pytest.mark.parametrize("name", sorted(MESSAGES))
def test_the_fields_and_the_example_are_those_of_the_message(name: str) -> None:
    section = re.search(rf"^## {name}\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL)
    assert section is not None
    fields = {f.json_name for f in MESSAGES[name].fields} - {"header"}
    prose, _, rest = section[1].partition("```json")
    missing = {field for field in fields if f"`{field}`" not in prose}
    assert not missing
    example = json.loads(rest.partition("```")[0])
    event = json_format.ParseDict(example, getattr(events_pb2, name)())
    assert json_format.MessageToDict(event) == example
    assert event.header.sequence

"""`make fuzz`: atheris drives `kv_wire`'s targets. It is not among the development packages; arguments are libFuzzer's."""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["pdmesh"]):
    from tests.fuzz.kv_wire import LENGTH, feed_agent, feed_parser


def test_one(data: bytes) -> None:
    feed_parser(data[LENGTH:])
    feed_agent(data)


atheris.Setup(sys.argv, test_one)
atheris.Fuzz()

"""The events that `pdmesh events` subscribes to, and those that it shows."""

from __future__ import annotations

import pytest

from pdmesh.cli.arguments import build_parser
from pdmesh.cli.commands.look import events
from pdmesh.cli.errors import CommandFailed


def patterns(*words: str) -> list[str]:
    return events._patterns(build_parser().parse_args(["events", *words]))


def test_it_follows_everything_a_pattern_or_whole_domains() -> None:
    assert patterns() == ["mesh.v1.>"]
    assert patterns("mesh.v1.load.>") == ["mesh.v1.load.>"]
    assert patterns("--domain", "health,group,health") == ["mesh.v1.health.>", "mesh.v1.group.>"]


@pytest.mark.parametrize(
    ("domain", "said"),
    [("helth", "there is no helth; did you mean health?"), ("x", "there are control, error,")],
)
def test_an_unknown_domain_is_named_with_the_known_ones(domain: str, said: str) -> None:
    with pytest.raises(CommandFailed, match=said.replace("?", r"\?")):
        patterns("--domain", domain)

"""The error for an unknown word names the command and suggests a similar word."""

from __future__ import annotations

import pytest

from pdmesh.cli import app
from pdmesh.cli.arguments import build_parser


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["stauts"], "there is no 'stauts'; did you mean status?"),
        (["pins", "lst"], "there is no 'lst'; did you mean list?"),
        (["status", "--jsn"], "pdmesh status: error: unrecognized arguments: --jsn; did you mean"),
        (["--state-dri=x", "status"], "did you mean --state-dir?"),
        (["status", "-o", "yml"], "did you mean yaml?"),
        (["zzz"], "invalid choice: 'zzz'"),
        (["status", "extra"], "unrecognized arguments: extra"),
    ],
)
def test_an_unknown_word_is_refused_with_the_closest_known_one(
    asked: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        app.main(asked)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("words", [["groups"], ["pins", "list"], ["drain", "decode-0"]])
def test_options_of_the_mesh_may_stand_at_any_place_and_the_last_one_wins(
    words: list[str],
) -> None:
    for place in range(len(words) + 1):
        asked = [*words[:place], "--nats-url", "nats://x", "--admin-token", "t", *words[place:]]
        found = build_parser().parse_args(asked)
        assert (found.nats_url, found.admin_token) == ("nats://x", "t"), asked
    twice = ["--admin-token", "first", *words, "--admin-token", "last"]
    assert build_parser().parse_args(twice).admin_token == "last"

"""One setting names several servers. An error names the wrong address without its password."""

from __future__ import annotations

import pytest

from pdmesh.config import url_problem, without_password
from pdmesh.core.server_urls import SentinelUrl, server_urls

SENTINELS = "rediss-sentinel://gateway:s3cret@10.0.0.1:26379,10.0.0.2,[fd00::3]:7/2?primary=mesh"


@pytest.mark.parametrize(
    ("url", "urls"),
    [
        ("nats://a:1", ["nats://a:1"]),
        ("tls://u:p@a:1,b:2", ["tls://u:p@a:1", "tls://u:p@b:2"]),
        ("tls://a:1,tls://b:2", ["tls://a:1", "tls://b:2"]),
        ("tls://u:p@a:1,v:q@b:2", ["tls://u:p@a:1", "tls://v:q@b:2"]),
        ("a:1,b:2", ["a:1", "b:2"]),
    ],
)
def test_each_server_has_the_scheme_and_user_of_the_first(url: str, urls: list[str]) -> None:
    assert server_urls(url) == urls
    assert url_problem(url) == ""


def test_sentinels_a_user_and_the_primarys_name_are_read() -> None:
    url = SentinelUrl.parse(SENTINELS)
    assert url.sentinels == (("10.0.0.1", 26379), ("10.0.0.2", 26379), ("fd00::3", 7))
    assert (url.primary, url.database, url.is_encrypted) == ("mesh", 2, True)
    assert (url.username, url.password) == ("gateway", "s3cret")
    assert "s3cret" not in repr(url)
    assert url_problem(SENTINELS) == ""


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("tls://a:1,b:s3cret", "not of the form"),
        ("tls://a:1,,b:2", "not of the form"),
        ("tls://a:1,nats://b:2", "different schemes"),
        ("rediss-sentinel://u:s3cret@a:1/0", "primary=NAME"),
        ("rediss-sentinel://u:s3cret@a:1?primary=x", "primary=NAME"),
        ("rediss-sentinel://u:p@a:s3cret/0?primary=x", "a sentinel is not of the form host:port"),
        ("rediss-sentinel://u:p@a:1,/0?primary=x", "a sentinel is not of the form host:port"),
        ("rediss-sentinel://u:p@a:1/s3cret?primary=x", "primary=NAME"),
    ],
)
def test_a_problem_is_named_without_the_password(url: str, problem: str) -> None:
    assert problem in url_problem(url)
    assert "s3cret" not in url_problem(url)


def test_passwords_of_all_servers_are_hidden() -> None:
    assert without_password("tls://u:p@a:1,v:q@b:2") == "tls://***@a:1,***@b:2"
    assert without_password("tls://a:1,b:2") == "tls://a:1,b:2"
    assert "s3cret" not in without_password(SENTINELS)

"""Parses a setting with the addresses of several servers: a NATS cluster, or Redis sentinels.

    tls://10.0.0.11:4222,10.0.0.12:4222,10.0.0.13:4222
    rediss-sentinel://gateway:password@10.0.0.11:26379,10.0.0.12:26379/0?primary=pdmesh

A server without a scheme gets the first server's scheme, and also its user if it names none.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Self
from urllib.parse import parse_qs, unquote, urlsplit

SENTINEL_SCHEMES: Final = ("redis-sentinel", "rediss-sentinel")
_SENTINEL_PORT: Final = 26379


def server_urls(url: str) -> list[str]:
    """The full address of each server, with its scheme and its user."""
    first, *others = url.split(",")
    scheme, found, rest = first.partition("://")
    user = rest.rpartition("@")[0]
    start = f"{scheme}{found}" if found else ""
    credentials = f"{user}@" if user else ""

    def whole(other: str) -> str:
        if "://" in other:
            return other
        return f"{start}{'' if '@' in other else credentials}{other}"

    return [first, *map(whole, others)]


def is_sentinel_url(url: str) -> bool:
    return url.partition("://")[0] in SENTINEL_SCHEMES


@dataclass(frozen=True, slots=True)
class SentinelUrl:
    """The address of a Redis or Valkey whose sentinels know the present primary.

    The same user and password are used for the sentinels and for the primary.
    """

    is_encrypted: bool
    sentinels: tuple[tuple[str, int], ...]
    primary: str  # the name under which the sentinels watch the primary
    database: int = 0
    username: str = ""
    password: str = field(default="", repr=False)

    @classmethod
    def parse(cls, url: str) -> Self:
        """Raises ValueError. The error's text contains no part of a password."""
        scheme, _, rest = url.partition("://")
        if scheme not in SENTINEL_SCHEMES:
            raise ValueError(f"not of the form {_FORM}")
        hosts, slash, tail = rest.partition("/")
        credentials, _, hosts = hosts.rpartition("@")
        username, _, password = credentials.partition(":")
        database, _, query = tail.partition("?")
        primary = parse_qs(query).get("primary", [""])[0]
        if not (slash and primary and (database or "0").isdigit()):
            raise ValueError(f"not of the form {_FORM}")
        return cls(
            is_encrypted=scheme == "rediss-sentinel",
            sentinels=tuple(_host_and_port(each) for each in hosts.split(",")),
            primary=primary,
            database=int(database or "0"),
            username=unquote(username),
            password=unquote(password),
        )


_FORM: Final = "rediss-sentinel://user:password@host:port,host:port/0?primary=NAME"


def _host_and_port(text: str) -> tuple[str, int]:
    parts = urlsplit(f"tcp://{text}")
    try:
        port = _SENTINEL_PORT if parts.port is None else parts.port
    except ValueError:
        port = 0
    if not parts.hostname or not port:
        raise ValueError("a sentinel is not of the form host:port")
    return parts.hostname, port

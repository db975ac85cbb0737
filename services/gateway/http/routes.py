"""The routes of the public port: paths, their handlers, and descriptions for `/openapi.json`.

A route cannot be made without its description, an `Operation`. So the document lists every path.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import unquote

import msgspec

from pdmesh.errors import InvalidRequest
from pdmesh.services.gateway.http.answers import ErrorAnswer
from pdmesh.services.gateway.http.exchange import HttpExchange, WrongMethod

Handler = Callable[[HttpExchange], Awaitable[None]]
_PARAMETER: Final = re.compile(r"\{(\w+)(:path)?\}")
_NONE: Final[Mapping[str, str]] = MappingProxyType({})


class NoRoute(InvalidRequest):
    grpc_code, http_status, default_reason = "UNIMPLEMENTED", 404, "NOT_FOUND"


# The error statuses of paths that use a model, and of most other paths.
ASKING_ERRORS: Final = (400, 401, 403, 404, 413, 429, 500, 503, 504)
TELLING_ERRORS: Final = (401, 403, 404, 429, 500, 503)


# A type that msgspec can describe, such as a struct or a union of structs.
Shape = Any


@dataclass(frozen=True, slots=True)
class Operation:
    """The request and the answers of one method of one path, as types that msgspec can describe.

    `takes` is the struct that validates the body. `streams` is the type of the data of each event
    of a stream. `errors` are the statuses of the error answers. `makes` maps a path parameter of
    other operations to the JSON pointer of its value in this answer. `query` has the schema of
    each field of the query.
    """

    summary: str
    gives: Shape
    takes: type[msgspec.Struct] | None = None
    streams: Shape = None
    errors: Sequence[int] = ()
    fails: Shape = ErrorAnswer  # the type of an error's body
    other: Mapping[int, Shape] = field(default_factory=dict)  # further statuses
    ends_in_done: bool = True  # whether the stream ends with `data: [DONE]`
    is_open: bool = False  # needs no API key
    makes: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, Shape] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HttpRoute:
    """`path` may have parameters: `{name}` for one segment, `{name:path}` for several segments."""

    method: str
    path: str
    handler: Handler
    operation: Operation


class Router:
    def __init__(self, routes: Sequence[HttpRoute]) -> None:
        self.routes = routes
        self._exact: dict[str, dict[str, Handler]] = {}
        self._patterns: dict[re.Pattern[str], dict[str, Handler]] = {}
        for route in routes:
            if "{" in route.path:
                methods = self._patterns.setdefault(_pattern(route.path), {})
            else:
                methods = self._exact.setdefault(route.path, {})
            assert route.method not in methods, f"{route.method} {route.path} is served twice"
            methods[route.method] = route.handler

    def find(self, path: str, method: str) -> tuple[Handler, Mapping[str, str]]:
        """The handler and the path's parameters. Raises NoRoute, WrongMethod.

        `path` is as the client sent it. Percent-encoding is decoded only in parameters.
        """
        methods, parameters = self._exact.get(path), _NONE
        if methods is None:
            methods, parameters = self._matching(path)
        handler = methods.get(method)
        if handler is None:
            raise WrongMethod(", ".join(sorted(methods)))
        return handler, parameters

    def _matching(self, path: str) -> tuple[dict[str, Handler], Mapping[str, str]]:
        for pattern, methods in self._patterns.items():
            if found := pattern.fullmatch(path):
                return methods, {name: unquote(text) for name, text in found.groupdict().items()}
        raise NoRoute("no such path")


def _pattern(path: str) -> re.Pattern[str]:
    """A pattern for `path`, with its parameters as named groups."""
    parts: list[str] = []
    end = 0
    for found in _PARAMETER.finditer(path):
        parts.append(re.escape(path[end : found.start()]))
        parts.append(f"(?P<{found[1]}>{'.*' if found[2] else '[^/]+'})")
        end = found.end()
    return re.compile("".join(parts) + re.escape(path[end:]))


def path_parameters(path: str) -> list[str]:
    return [found[1] for found in _PARAMETER.finditer(path)]


def plain_path(path: str) -> str:
    """The path in OpenAPI's form, in which `{name:path}` is `{name}`."""
    return _PARAMETER.sub(r"{\1}", path)

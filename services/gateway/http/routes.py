"""The paths of the public port: which handler serves each, and what `/openapi.json` says of it.

A route cannot be made without its `Operation`, so no path is served that the document leaves out.
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


# The statuses of errors: of paths that ask for a model, and of those that say what there is.
ASKING_ERRORS: Final = (400, 401, 403, 404, 413, 429, 500, 503, 504)
TELLING_ERRORS: Final = (401, 403, 404, 429, 500, 503)


# Any: a type that msgspec can describe: a struct, or a union of them.
Shape = Any


@dataclass(frozen=True, slots=True)
class Operation:
    """What one method of one path takes and answers, as types that msgspec can describe.

    `takes` is the very struct that validates the body. `streams`: what the data of each event of a
    stream is. `errors`: the statuses of its error answers.
    """

    summary: str
    gives: Shape
    takes: type[msgspec.Struct] | None = None
    streams: Shape = None
    errors: Sequence[int] = ()
    fails: Shape = ErrorAnswer  # what the body of an error is
    other: Mapping[int, Shape] = field(default_factory=dict)  # further statuses
    ends_in_done: bool = True  # its stream, with `data: [DONE]`
    is_open: bool = False  # needs no API key


@dataclass(frozen=True, slots=True)
class HttpRoute:
    """`path` may hold parameters: `{name}` is one segment, `{name:path}` any number of them."""

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
        """The handler, and the path's parameters. Raises NoRoute, WrongMethod.

        `path` is as it was sent. Percent-encoding makes no other path, but may be in a parameter.
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
    """Matches paths like `path`; its parameters are named groups."""
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
    """As OpenAPI writes it, which tells nothing of how much a parameter holds."""
    return _PARAMETER.sub(r"{\1}", path)

"""A path and a method lead to a handler, which gets the values of the path's parameters."""

from __future__ import annotations

from typing import Any

import pytest

from pdmesh.services.gateway.http.exchange import HttpExchange, WrongMethod
from pdmesh.services.gateway.http.routes import (
    HttpRoute,
    NoRoute,
    Operation,
    Router,
    path_parameters,
    plain_path,
)

SHAPE = Operation("what it does", dict[str, Any])


def route(method: str, path: str) -> HttpRoute:
    async def handler(exchange: HttpExchange) -> None: ...

    return HttpRoute(method, path, handler, SHAPE)


ROUTES = [
    route("GET", "/v1/models"),
    route("GET", "/v1/models/{model:path}"),
    route("GET", "/v1/responses/{id}"),
    route("DELETE", "/v1/responses/{id}"),
    route("POST", "/v1/responses/{id}/cancel"),
]


@pytest.mark.parametrize(
    ("path", "method", "index", "parameters"),
    [
        ("/v1/models", "GET", 0, {}),
        ("/v1/models/a", "GET", 1, {"model": "a"}),
        ("/v1/models/org/name", "GET", 1, {"model": "org/name"}),
        ("/v1/models/org%2Fname", "GET", 1, {"model": "org/name"}),
        ("/v1/responses/r-1", "GET", 2, {"id": "r-1"}),
        ("/v1/responses/r-1", "DELETE", 3, {"id": "r-1"}),
        ("/v1/responses/r%20/cancel", "POST", 4, {"id": "r "}),
    ],
)
def test_a_path_finds_its_handler(
    path: str, method: str, index: int, parameters: dict[str, str]
) -> None:
    assert Router(ROUTES).find(path, method) == (ROUTES[index].handler, parameters)


@pytest.mark.parametrize(
    "path", ["/", "/v1/model", "/v1/models%2Fa", "/v1/responses/", "/v1/responses/a/b", ""]
)
def test_any_other_path_is_refused(path: str) -> None:
    with pytest.raises(NoRoute):
        Router(ROUTES).find(path, "GET")


def test_the_refusal_of_a_method_lists_the_allowed_ones() -> None:
    with pytest.raises(WrongMethod) as caught:
        Router(ROUTES).find("/v1/responses/r-1", "PUT")
    assert caught.value.allowed == "DELETE, GET"


def test_a_path_has_one_handler_per_method() -> None:
    with pytest.raises(AssertionError, match="GET /v1/models is served twice"):
        Router([*ROUTES, route("GET", "/v1/models")])


def test_a_document_writes_paths_without_the_kind_of_their_parameters() -> None:
    assert plain_path("/a/{b:path}/c/{d}") == "/a/{b}/c/{d}"
    assert path_parameters("/a/{b:path}/c/{d}") == ["b", "d"]

"""Checks that answers of the HTTP API have the types that `/openapi.json` documents."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec

from pdmesh.services.gateway.http.openapi import operation_id
from pdmesh.services.gateway.http.routes import HttpRoute, Operation
from tests.fakes.gateway_mesh import GatewayMesh


def routes_of(mesh: GatewayMesh) -> dict[str, HttpRoute]:
    return {operation_id(route): route for route in mesh.gateway.http_app.routes}


async def check_answers(http: httpx.AsyncClient, route: HttpRoute, sample: Any) -> None:
    operation = route.operation
    if isinstance(sample, str):
        answer = await http.request(route.method, sample.format(kept=await kept_id(http)))
    else:
        answer = await http.request(route.method, route.path, json=sample)
    assert answer.status_code == 200, answer.text
    msgspec.json.decode(answer.content, type=operation.gives)
    if operation.streams is not None:
        body = sample | {"stream": True}
        answer = await http.request(route.method, route.path, json=body)
        check_events(answer, operation)
    if operation.takes is not None:
        answer = await http.request(route.method, route.path, content=b"{")
        assert answer.status_code == 400
        msgspec.json.decode(answer.content, type=operation.fails)


async def kept_id(http: httpx.AsyncClient) -> str:
    answer = await http.post(
        "/v1/responses", json={"model": "tiny", "input": "x", "background": True}
    )
    return str(answer.json()["id"])


def check_events(answer: httpx.Response, operation: Operation) -> None:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line.partition(":") for line in answer.text.splitlines()]
    told = [data.strip() for name, _, data in lines if name == "data"]
    assert (told[-1] == "[DONE]") == operation.ends_in_done
    events = [each for each in told if each != "[DONE]"]
    assert events
    for event in events:
        msgspec.json.decode(event, type=operation.streams)

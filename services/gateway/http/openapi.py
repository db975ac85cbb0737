"""Makes `/openapi.json` from the routes: OpenAPI 3.1 with the schemas that validate requests.

The structs of requests and answers define the names and types of fields. Their `Meta` defines the
bounds. `unsupported_fields` lists the values that are accepted for unsupported fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

import msgspec

import pdmesh
from pdmesh.services.gateway.http.openapi_rules import RULES, without_nul
from pdmesh.services.gateway.http.routes import HttpRoute, Operation, path_parameters, plain_path
from pdmesh.services.gateway.openai.schema import unsupported_fields

# A JSON object to be encoded, with values of any type.
Json = dict[str, Any]

_REFERENCE: Final = "#/components/schemas/{name}"
_STREAM: Final = "text/event-stream"
_INFO: Final = {
    "title": "pdmesh",
    "version": pdmesh.__version__,
    "description": "The OpenAI API, served by prefill and decode on different instances. "
    "A field of a request that no schema here has is ignored and named in the header "
    "x-pdmesh-ignored, unless the gateway is set up to refuse it. "
    "A request that is not valid HTTP/1.1 gets 400, 408, 431, 501 or 505 without a body.",
}
_HEADERS: Final = {
    "x-request-id": ("The id of the request in logs, traces and events", "string"),
    "x-pdmesh-ignored": ("Unknown fields of the request, which had no effect", "string"),
    "retry-after": ("Seconds to wait before the request is sent again", "integer"),
    "www-authenticate": ("How to authenticate", "string"),
}
_WITH_RETRY_AFTER: Final = (429, 503)


def document(routes: Sequence[HttpRoute], *, is_strict: bool) -> Json:
    """The document. With `is_strict`, its schemas refuse unknown fields of requests."""
    shapes: list[Any] = []
    for route in routes:
        operation = route.operation
        shapes += [operation.gives, operation.fails, *operation.other.values()]
        shapes += [s for s in (operation.takes, operation.streams) if s is not None]
    found, components = msgspec.json.schema_components(shapes, ref_template=_REFERENCE)
    references = {id(shape): schema for shape, schema in zip(shapes, found, strict=True)}
    _say_what_is_unsupported(components, routes)
    taken = [route.operation.takes for route in routes if route.operation.takes is not None]
    _complete_requests(components, taken, is_strict=is_strict)
    paths: Json = {}
    for route in routes:
        item = paths.setdefault(plain_path(route.path), {})
        item[route.method.lower()] = _operation(route, references)
        if links := _links(route, routes):
            item[route.method.lower()]["responses"]["200"]["links"] = links
    return {
        "openapi": "3.1.0",
        "info": _INFO,
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "headers": {
                name: {"description": text, "schema": {"type": kind}}
                for name, (text, kind) in _HEADERS.items()
            },
        },
    }


def _operation(route: HttpRoute, references: Mapping[int, Json]) -> Json:
    operation = route.operation
    content: Json = {"application/json": {"schema": references[id(operation.gives)]}}
    if operation.streams is not None:
        content[_STREAM] = {"schema": _stream(operation, references[id(operation.streams)])}
    responses = {"200": _response(200, content)}
    for status, shape in operation.other.items():
        responses[str(status)] = _response(
            status, {"application/json": {"schema": references[id(shape)]}}
        )
    error = {"application/json": {"schema": references[id(operation.fails)]}}
    responses |= {str(status): _response(status, error) for status in operation.errors}
    described: Json = {
        "operationId": operation_id(route),
        "summary": operation.summary,
        "responses": responses,
        # `{}` means that no key is needed, because the gateway may run without keys.
        "security": [] if operation.is_open else [{}, {"key": []}],
    }
    if parameters := _parameters(route):
        described["parameters"] = parameters
    if operation.takes is not None:
        body = {"application/json": {"schema": references[id(operation.takes)]}}
        described["requestBody"] = {"required": True, "content": body}
    return described


def _parameters(route: HttpRoute) -> list[Json]:
    in_path = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in path_parameters(route.path)
    ]
    query = route.operation.query.items()
    return in_path + [
        {"name": name, "in": "query", "required": False, "schema": schema} for name, schema in query
    ]


def _links(route: HttpRoute, routes: Sequence[HttpRoute]) -> Json:
    """Links to the operations whose path parameters are all in the answer of this route."""
    makes = route.operation.makes
    links: Json = {}
    for other in routes:
        names = path_parameters(other.path)
        if names and all(name in makes for name in names):
            parameters = {name: f"$response.body#{makes[name]}" for name in names}
            target = operation_id(other)
            links[target] = {"operationId": target, "parameters": parameters}
    return links


def _stream(operation: Operation, event: Json) -> Json:
    """The schema of one event of the stream."""
    data: Json = {
        "type": "string", "contentMediaType": "application/json", "contentSchema": event,
    }  # fmt: skip
    if operation.ends_in_done:
        return {
            "type": "object",
            "description": "The data of the last event is [DONE].",
            "properties": {"data": {"anyOf": [data, {"const": "[DONE]"}]}},
            "required": ["data"],
        }
    return {
        "type": "object",
        "description": "Each event has the name of its data's type.",
        "properties": {"event": {"type": "string"}, "data": data},
        "required": ["event", "data"],
    }


def operation_id(route: HttpRoute) -> str:
    """A name that is also a valid identifier in most languages."""
    words = [w for w in plain_path(route.path).replace("{", "by/").replace("}", "").split("/") if w]
    return "_".join([route.method.lower(), *words]).replace(".", "_")


def _response(status: int, content: Json) -> Json:
    names = ["x-request-id"]
    if status == HTTPStatus.UNAUTHORIZED:
        names.append("www-authenticate")
    if status in _WITH_RETRY_AFTER:
        names.append("retry-after")
    if status == HTTPStatus.OK:
        names.append("x-pdmesh-ignored")
    return {
        "description": HTTPStatus(status).phrase,
        "headers": {name: {"$ref": f"#/components/headers/{name}"} for name in names},
        "content": content,
    }


def _complete_requests(components: Json, taken: Sequence[type], *, is_strict: bool) -> None:
    """Add the rules that the types of requests cannot express.

    Unless `is_strict`, also allow unknown fields.
    """
    for name in msgspec.json.schema_components(taken)[1]:
        without_nul(components[name])
        if not is_strict:
            components[name].pop("additionalProperties", None)
    for struct, rule in RULES.items():
        if struct.__name__ in components:
            components[struct.__name__] |= rule


def _say_what_is_unsupported(components: Json, routes: Sequence[HttpRoute]) -> None:
    """Describe each unsupported field by its accepted values, which have no effect."""
    for route in routes:
        struct = route.operation.takes
        if struct is None:
            continue
        properties = components[struct.__name__]["properties"]
        for name, values in unsupported_fields(struct).items():
            properties[name] = {"enum": [None, *values], "default": None}

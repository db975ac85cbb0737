"""Ten JSON schemas of the kinds that clients send for structured output."""

from __future__ import annotations

from typing import Any


def obj(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    fixed = {"required": list(properties), "additionalProperties": False}
    return {"type": "object", "properties": properties, **fixed, **more}


TEXT, INTEGER = {"type": "string", "maxLength": 40}, {"type": "integer"}
TREE = {"$ref": "#/$defs/node"}
SCHEMAS: tuple[dict[str, Any], ...] = (
    obj({"name": TEXT, "age": {"type": "integer", "minimum": 0, "maximum": 120}}),
    obj({"colour": {"enum": ["red", "green", "blue"]}, "is_light": {"type": "boolean"}}),
    obj({"tags": {"type": "array", "items": TEXT, "minItems": 1, "maxItems": 4}}),
    obj({"at": obj({"x": {"type": "number"}, "y": {"type": "number"}}), "label": TEXT}),
    obj({"id": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"}}),
    obj({"value": {"anyOf": [{"type": "null"}, INTEGER, TEXT]}}),
    obj({"when": {"type": "string", "format": "date"}, "kind": {"const": "event"}}),
    obj({"rows": {"type": "array", "items": obj({"n": INTEGER}), "maxItems": 3}}),
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 6},
    obj({"root": TREE}) | {"$defs": {"node": obj({"v": {"type": "boolean"}})
        | {"properties": {"v": {"type": "boolean"}, "left": TREE}, "required": ["v"]}}},
)  # fmt: skip

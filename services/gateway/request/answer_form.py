"""Reads which form a client wants for the answer, and makes the constraint for the engine.

A form is, for example, a JSON schema or a regular expression. A client asks for it with OpenAI's
field `response_format` or with vLLM's field `structured_outputs`. A form that the model's engine
cannot enforce is refused here, before the request takes a slot of an instance.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from pdmesh.core.sampling.constraint import Constraint
from pdmesh.core.tenancy.limits import Tenant
from pdmesh.engine.grammars.asked_grammars import AskedGrammar, GrammarKind
from pdmesh.errors import InvalidRequest
from pdmesh.services.gateway.request.frontend import Frontend
from pdmesh.services.gateway.request.spec import ServedModel

# A JSON schema. Its values are Any because only the compiler of grammars reads them.
_Schema = dict[str, Any]


class JsonSchemaFormat(msgspec.Struct, forbid_unknown_fields=True):
    """OpenAI's `json_schema`. `strict` has no effect: the answer always keeps to the schema."""

    name: str | None = None
    description: str | None = None
    schema: _Schema | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    triggers: list[str] | None = None
    structures: list[_Schema] | None = None
    format: Any = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's `structured_outputs`, of which a client may set one kind (`_KINDS`).

    `structural_tag` is a string that contains JSON.
    """

    json: _Schema | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None


_KINDS: Final = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


def asked_over_http(
    response_format: ResponseFormat | None, structured_outputs: StructuredOutputs | None
) -> AskedGrammar | None:
    """The grammar that the client asks for. None if the answer may have any form.

    Raises InvalidRequest with the field.
    """
    by_openai = _of_response_format(response_format) if response_format is not None else None
    by_vllm = _of_structured_outputs(structured_outputs) if structured_outputs is not None else None
    if by_openai is not None and by_vllm is not None:
        message = "structured_outputs and response_format exclude each other"
        raise InvalidRequest(message, field="structured_outputs")
    return by_openai or by_vllm


async def constraint_of(
    asked: AskedGrammar | None, model: ServedModel, frontend: Frontend, tenant: Tenant
) -> Constraint | None:
    """Make the constraint that engines get. Raises InvalidRequest with the field, or Overloaded."""
    if asked is None:
        return None
    if "\0" in asked.text:
        raise InvalidRequest(f"{asked.field} holds U+0000", field=asked.field)
    if not frontend.shared.fleet.supports_constraints(model.name):
        message = f"{asked.field} is not supported by this model's engine"
        raise InvalidRequest(message, reason="UNSUPPORTED_FIELD", field=asked.field)
    grammar = await frontend.shared.grammars.grammar(asked, model.tokenizer, tenant)
    return Constraint(grammar, asked_by=asked.field)


def _of_response_format(asked: ResponseFormat) -> AskedGrammar | None:
    match asked.type:
        case "text":
            return None
        case "json_object":
            return AskedGrammar(GrammarKind.JSON_OBJECT)
        case "json_schema":
            field = "response_format.json_schema"
            if asked.json_schema is None or asked.json_schema.schema is None:
                field = field if asked.json_schema is None else f"{field}.schema"
                raise InvalidRequest(f"missing field: {field}", reason="MISSING_FIELD", field=field)
            field = f"{field}.schema"
            return AskedGrammar(GrammarKind.JSON, _json(asked.json_schema.schema, field), field)
        case "structural_tag":
            if asked.format is not None:
                message = "response_format.format is not supported; triggers and structures are"
                raise InvalidRequest(
                    message, reason="UNSUPPORTED_FIELD", field="response_format.format"
                )
            field = "response_format.structures"
            tag = {"triggers": asked.triggers or [], "structures": asked.structures or []}
            return AskedGrammar(GrammarKind.STRUCTURAL_TAG, _json(tag, field), field)


def _of_structured_outputs(asked: StructuredOutputs) -> AskedGrammar:
    """The grammar of the one kind that is set. Raises InvalidRequest with the field.

    A value without a kind is refused, as in vLLM. The HTTP API drops a misspelt kind as an unknown
    field. Without this check, the answer would then be unconstrained.
    """
    for name in ("disable_additional_properties", "whitespace_pattern"):
        if getattr(asked, name):
            field = f"structured_outputs.{name}"
            message = f"{field} is not supported"
            raise InvalidRequest(message, reason="UNSUPPORTED_FIELD", field=field)
    given = [name for name in _KINDS if getattr(asked, name) is not None]
    if not given:
        message = f"structured_outputs needs one of {', '.join(_KINDS)}"
        raise InvalidRequest(message, reason="MISSING_FIELD", field="structured_outputs")
    field = f"structured_outputs.{given[-1]}"
    if len(given) > 1:
        raise InvalidRequest(f"{field}: only one kind at a time", field=field)
    if asked.json_object is False:
        raise InvalidRequest(f"{field} must be true or absent", field=field)
    value = getattr(asked, given[0])
    text = value if isinstance(value, str) else "" if value is True else _json(value, field)
    has_any_whitespace = not asked.disable_any_whitespace
    return AskedGrammar(GrammarKind(given[0]), text, field, has_any_whitespace)


def _json(value: object, field: str) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except RecursionError:
        message = f"{field} is nested too deeply"
        raise InvalidRequest(message, reason="GRAMMAR_REFUSED", field=field) from None

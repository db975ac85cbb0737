"""Writes the settings of each service into the Helm chart's values.schema.json.

The settings come from the Settings classes themselves. The rest of the file is written by hand.
Helm refuses a value that is not a setting or has the wrong type, and names it, before anything is
installed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Final

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from pdmesh.config import ServiceSettings, is_shared
from tools.configuration_doc import SERVICES, settings_of

# Settings that the chart sets from other values, from the pod or from its Secret, and settings that
# only tests use.
NOT_IN_VALUES: Final = frozenset({
    "ADMIN_TOKEN", "ADMIN_TOKEN_FILE", "ADVERTISE_HOST", "ALLOW_ANONYMOUS", "DEVICE_DIR",
    "DRAIN_S", "FAILPOINT", "GRPC_PORT", "HASH_SECRET", "HOST", "HTTP_PORT", "INNER_HOST",
    "INSTANCE_ID", "KEYS_FILE", "LOG_FORMAT", "MESH_TOKEN", "MESH_TOKEN_FILE", "NATS_URL",
    "NODE_ID", "NODE_STATUS_FILE", "OIDC_AUDIENCE", "OIDC_CA_FILE", "OIDC_ISSUER", "OPS_FILE",
    "OPS_PORT", "PICKER_PORT", "REDIS_URL", "REUSE_PORT", "ROLE", "STATE_DIR", "TLS_DIR",
})  # fmt: skip
# The instance services. Pools of the roles pooling, encoder and blank run the service `instance`.
INSTANCES: Final = ("prefill", "decode", "instance")
_KEPT: Final = (
    "type", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
    "pattern", "maxLength",
)  # fmt: skip
Schema = dict[str, Any]


def definitions() -> dict[str, Schema]:
    """The settings of each service, by the service's name in the values.

    Settings that can be set without a service's name (`shared`) are also under `all`.
    """
    shared: Schema = {}
    found: dict[str, Schema] = {}
    for service in SERVICES:
        own = _properties(settings_of(service))
        shared |= {n: s for n, s in own.items() if is_shared(_field(settings_of(service), n))}
        found[service] = own
    instance: Schema = {}
    for service in INSTANCES:
        instance |= found[service]
    named = {s: found[s] for s in SERVICES if s not in INSTANCES}
    return {
        name: {
            "type": "object",
            "additionalProperties": False,
            "properties": dict(sorted(p.items())),
        }
        for name, p in {"all": shared, "instance": instance, **named}.items()
    }


def _field(settings_type: type[ServiceSettings], variable: str) -> FieldInfo:
    return settings_type.model_fields[variable.lower()]


def _properties(settings_type: type[ServiceSettings]) -> dict[str, Schema]:
    whole = settings_type.model_json_schema()
    return {
        name.upper(): {
            **_kind(whole["properties"][name], whole.get("$defs", {})),
            "description": field.description or "",
        }
        for name, field in settings_type.model_fields.items()
        if name.upper() not in NOT_IN_VALUES and field.annotation is not SecretStr
    }


def _kind(schema: Schema, known: Mapping[str, Schema]) -> Schema:
    """The part of a setting's schema that Helm can check.

    A structure may be given as YAML or as JSON text.
    """
    for choice in schema.get("anyOf", ()):
        if choice.get("type") != "null":
            return _kind(choice, known)
    if "$ref" in schema:
        return _kind(known[schema["$ref"].rpartition("/")[2]], known)
    if schema.get("type") in ("object", "array"):
        return {"type": [schema["type"], "string"]}
    if "const" in schema:
        return {"type": "string", "enum": [schema["const"]]}
    return {k: _plain(v) for k, v in schema.items() if k in _KEPT}


def _plain(value: object) -> object:
    return value.value if isinstance(value, Enum) else value


def document(text: str) -> str:
    """The text of the schema, with its settings replaced by those of the code."""
    schema = json.loads(text)
    schema["definitions"]["settings"] = definitions()
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    file = Path(sys.argv[1])
    file.write_text(document(file.read_text()))


if __name__ == "__main__":
    main()

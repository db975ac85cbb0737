"""Reads the settings of services from environment variables, once in `main()`.

Each service has a frozen class of settings, and a prefix for its variables
(`PDMESH_GATEWAY_GRPC_PORT`). A field that is marked `shared` can also be set without the service's
name (`PDMESH_NATS_URL`), so that one variable configures the whole mesh. If both variables are set,
the one with the service's name wins.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Final, Literal, Self, get_args, get_origin
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError, PydanticUndefined
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from pdmesh.core.server_urls import SentinelUrl, is_sentinel_url, server_urls

SHARED_PREFIX: Final = "PDMESH_"
MIN_SECRET_CHARS: Final = 16
_SHARED_MARK: Final = "is_shared"
_REQUIRED: Final = ...


class BadSetting(Exception):
    """An environment variable has an unusable value. The message is one line with its name."""


def settings_config(prefix: str) -> SettingsConfigDict:
    """The `model_config` of a service's Settings. `prefix` is `PDMESH_<SERVICE>_`."""
    return SettingsConfigDict(
        env_prefix=prefix,
        env_nested_delimiter="__",
        env_ignore_empty=True,
        frozen=True,
        extra="ignore",
        hide_input_in_errors=True,
        validate_default=True,
    )


def unknown_variables(settings_type: type[BaseSettings], environ: Mapping[str, str]) -> list[str]:
    """The variables with the service's prefix that match no field of the service.

    Such a variable is misspelled, or belongs to another version.
    """
    prefix = str(settings_type.model_config.get("env_prefix", ""))
    known = {prefix + name.upper() for name in settings_type.model_fields}
    return sorted(
        name
        for name in environ
        if name.upper().startswith(prefix) and name.upper().partition("__")[0] not in known
    )


# The return type is Any, as for pydantic's Field(), because fields of any type get the result.
def shared(default: Any = _REQUIRED, *, description: str, **constraints: Any) -> Any:
    """A field that services also read from `PDMESH_<FIELD>`, without their own name."""
    return Field(
        default,
        description=description,
        json_schema_extra={_SHARED_MARK: True},
        **constraints,
    )


def url_problem(url: str) -> str:
    """Describe the problem of a server's URL, or of several, separated by commas. Empty if valid.

    The text never contains a part of a password. A client library would find the problem later, in
    the middle of the start. Its message would quote a malformed port, and this port may in fact be
    the beginning of the password.
    """
    if is_sentinel_url(url):
        try:
            SentinelUrl.parse(url)
        except ValueError as exc:
            return str(exc)
        return ""
    urls = server_urls(url)
    if not all(map(_is_address, urls)):
        return (
            "not of the form scheme://user:password@host:port (use letters and digits in the "
            "password)"
        )
    if len({each.partition("://")[0] for each in urls if "://" in each}) > 1:
        return "its servers have different schemes"
    return ""


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url if "://" in url else f"tcp://{url}")
        return (bool(parts.hostname) and parts.port != 0) or parts.scheme == "unix"
    except ValueError:
        return False


def _checked_url(url: str) -> str:
    if problem := url_problem(url):
        raise PydanticCustomError("address", "{problem}", {"problem": problem})
    return url


ServerUrl = Annotated[str, AfterValidator(_checked_url)]


class JsonObject(BaseModel):
    """A JSON object in a setting or a file. Unknown fields and booleans are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @field_validator("*", mode="before")
    @classmethod
    def _has_no_flags(cls, value: object) -> object:
        """Refuse true and false, which pydantic would read as the numbers 1 and 0."""
        if isinstance(value, bool):
            raise PydanticCustomError("flag", "must not be true or false")
        return value


class ServiceSettings(BaseSettings):
    """The settings of every service.

    Subclass it and set `model_config = settings_config("PDMESH_X_")`.
    """

    model_config = settings_config(SHARED_PREFIX)

    instance_id: str = Field(
        "",
        description="Name of this process in the mesh; default: the service's name and four random "
        "hex digits",
        pattern=r"^[a-z0-9-]+$",
    )
    inner_host: str = shared(
        "127.0.0.1",
        description="Address of the ports for the mesh's own processes (gRPC, KV, OPS_PORT); an "
        "address that other machines can reach needs tls_dir, or insecure_network and mesh_token",
    )
    advertise_host: str | None = shared(
        None,
        description="Host name under which other processes reach this one; default: inner_host",
    )
    grpc_port: int = Field(0, ge=0, le=65535, description="gRPC port; 0 picks a free one")
    ops_port: int = Field(
        0, ge=0, le=65535, description="Port of /metrics and /health; 0 picks a free one"
    )
    mesh_token: SecretStr = shared(
        SecretStr(""),
        description="Token of every call between the mesh's processes, equal on all of them; "
        "without it and tls_dir, the process listens only on loopback",
    )
    mesh_token_file: Path | None = shared(
        None, description="File with the mesh token, instead of mesh_token"
    )
    tls_dir: Path | None = shared(
        None,
        description="Directory with tls.crt, tls.key and ca.crt, for mutual TLS between the mesh's "
        "processes; the certificate names this process",
    )
    insecure_network: bool = shared(
        False,
        description="Allow what tls_dir is for in plain text: calls between the mesh's processes, "
        "NATS and Redis over a network; only on a network that you trust",
    )
    nats_url: ServerUrl = shared(
        "nats://127.0.0.1:4222",
        description="NATS server, or the servers of a cluster, the nearest first: "
        "tls://10.0.0.11:4222,10.0.0.12:4222,10.0.0.13:4222",
    )
    nats_replicas: int = shared(
        0,
        ge=0,
        le=5,
        description="Copies of each bucket in a cluster of NATS, the same for all processes; 0: 3 "
        "if nats_url names three servers or more, else 1",
    )
    nats_roles: bool = shared(
        False,
        description="NATS knows processes by their certificates, with the accounts of pdmesh "
        "access nats; it needs tls_dir, and the same value for all processes",
    )
    node_id: str = shared(
        "",
        description="Name of the machine; default: its host name. The mesh writes a dash for a dot",
        pattern=r"^[a-z0-9.-]*$",
    )
    lease_s: float = shared(
        3.0, gt=0, description="Lease in the registry, renewed three times per lease"
    )
    log_format: Literal["auto", "json", "pretty"] = shared(
        "auto", description="Format of log lines; auto: pretty on a terminal, json otherwise"
    )
    log_level: Literal["debug", "info", "warning", "error"] = shared(
        "info", description="Lowest level that is logged"
    )
    otlp_endpoint: str | None = shared(
        None, description="OTLP/HTTP collector, e.g. http://127.0.0.1:4318; none: no export"
    )
    vllm_metric_names: bool = shared(
        False, description="Show metrics at /metrics under vLLM's names, too (docs/observe.md)"
    )
    state_dir: Path = shared(Path(".pdmesh"), description="Directory for sockets, logs and state")
    ops_file: Path | None = Field(
        None, description="File to write the ops address to, for the launcher of this process"
    )
    uvloop: bool = shared(True, description="Use uvloop when it is installed")
    loop_watch_s: float = shared(
        0.5,
        gt=0,
        description="Interval of measuring the event loop's lag; each measurement is a wake-up",
    )

    @property
    def node(self) -> str:
        """The machine's name. It consists of letters, digits and dashes."""
        name = self.node_id or socket.gethostname().lower()
        return re.sub(r"[^a-z0-9-]+", "-", name) or "node"

    @property
    def num_nats_replicas(self) -> int:
        """The number of NATS servers that hold each bucket."""
        return self.nats_replicas or (3 if len(server_urls(self.nats_url)) >= 3 else 1)

    @property
    def reachable_host(self) -> str:
        """The host in the addresses that this process publishes."""
        return self.advertise_host or self.inner_host

    def read_mesh_token(self) -> str:
        """Read the mesh token. Returns an empty string if there is none. Raises BadSetting."""
        return read_secret(
            "MESH_TOKEN", self.mesh_token.get_secret_value(), self.mesh_token_file, "a mesh token"
        )

    @classmethod
    def service(cls) -> str:
        """The service's name: `master-scheduler` for the prefix `PDMESH_MASTER_SCHEDULER_`."""
        prefix = str(cls.model_config.get("env_prefix", ""))
        return prefix.removeprefix(SHARED_PREFIX).strip("_").lower().replace("_", "-")

    @model_validator(mode="before")
    @classmethod
    def _name_the_process(cls, data: dict[str, Any]) -> dict[str, Any]:
        if not data.get("instance_id"):
            return {**data, "instance_id": f"{cls.service() or 'pdmesh'}-{secrets.token_hex(2)}"}
        return data

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, _SharedEnv(settings_cls, env_prefix=SHARED_PREFIX)

    @classmethod
    def load(cls) -> Self:
        """Read the environment. Raises `BadSetting`, whose message names the variable."""
        try:
            return cls()
        except ValidationError as exc:
            raise BadSetting(_one_line(cls, exc)) from None
        except SettingsError as exc:
            raise BadSetting(_not_json(cls, str(exc))) from None


def read_secret(name: str, value: str, file: Path | None, what: str) -> str:
    """Return the secret `value`, or read the secret from `file`. Raises BadSetting."""
    variable = f"{SHARED_PREFIX}{name}"
    if file is not None and not value:
        try:
            value = file.read_text().strip()
        except OSError as exc:
            raise BadSetting(f"{variable}_FILE: {file}: {exc.strerror}") from exc
        except UnicodeDecodeError as exc:
            raise BadSetting(f"{variable}_FILE: {file} is not text") from exc
        if not value:
            raise BadSetting(f"{variable}_FILE: {file} is empty")
    if value and not (len(value) >= MIN_SECRET_CHARS and value.isascii() and value.isprintable()):
        raise BadSetting(
            f"{variable}: {what} must have at least {MIN_SECRET_CHARS} ASCII characters"
        )
    return value


def is_set(environment: Mapping[str, str], variable: str) -> bool:
    """Whether an environment variable is true, by the rules of the services' settings."""
    return environment.get(variable, "").strip().lower() in ("1", "true", "t", "yes", "y", "on")


def node_status_file(state_dir: Path) -> Path:
    """The default path of the file in which a node's agent reports faults to the instances."""
    return state_dir / "run" / "node-status.json"


class _SharedEnv(EnvSettingsSource):
    """Reads `PDMESH_<FIELD>` for the shared fields only."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        if not is_shared(field):
            return None, field_name, False
        return super().get_field_value(field, field_name)


def is_shared(field: FieldInfo) -> bool:
    extra = field.json_schema_extra
    return isinstance(extra, dict) and extra.get(_SHARED_MARK) is True


@dataclass(frozen=True, slots=True)
class SettingLine:
    """One setting, as text for operators."""

    variable: str
    shared_variable: str | None
    type_name: str
    default: str
    value: str
    help: str


def describe(
    settings_type: type[ServiceSettings], settings: ServiceSettings | None = None
) -> Iterator[SettingLine]:
    """Describe every setting: its variable, default, value and help. Secrets are hidden."""
    prefix = str(settings_type.model_config.get("env_prefix", ""))
    for name, field in settings_type.model_fields.items():
        value = getattr(settings, name) if settings is not None else None
        yield SettingLine(
            variable=f"{prefix}{name.upper()}",
            shared_variable=f"{SHARED_PREFIX}{name.upper()}" if is_shared(field) else None,
            type_name=_type_name(field),
            default=_default_text(name, field),
            value=_text(value),
            help=field.description or "",
        )


def _type_name(field: FieldInfo) -> str:
    """The type of a setting's text: `json, pretty or auto`, `Path`, or `JSON` for structures."""
    kind, parts = get_origin(field.annotation), get_args(field.annotation)
    if kind is Literal:
        *others, last = map(str, parts)
        return f"{', '.join(others)} or {last}" if others else last
    # None is left out. It means "not set", so operators cannot write it.
    kinds = [part for part in parts if part is not NoneType] or [field.annotation]
    if kind in (dict, list) or any(_is_structure(each) for each in kinds):
        return "JSON"
    return " or ".join(getattr(each, "__name__", str(each)) for each in kinds)


def _is_structure(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _default_text(name: str, field: FieldInfo) -> str:
    if name == "instance_id":
        return "<service>-<hex>"
    if field.default_factory is not None:
        return "computed"
    if field.default is PydanticUndefined:
        return "required"
    return _text(field.default)


def _text(value: object) -> str:
    if isinstance(value, SecretStr):
        return "********" if value.get_secret_value() else ""
    return "" if value is None else without_password(str(value))


def without_password(text: str) -> str:
    """Turn `redis://user:secret@host` into `redis://***@host`, also in a list of servers."""
    return ",".join(map(_hidden, text.split(","))) if "://" in text else text


def _hidden(url: str) -> str:
    scheme, found, rest = url.rpartition("://")
    credentials, at, host = rest.rpartition("@")
    return f"{scheme}{found}***@{host}" if at and credentials else url


def _one_line(settings_type: type[ServiceSettings], exc: ValidationError) -> str:
    """Describe the first bad variable in one line, with the number of further ones."""
    errors = exc.errors(include_url=False, include_context=False, include_input=False)
    name, *within = map(str, errors[0]["loc"] or ("",))
    where = f"{'.'.join(within)}: " if within else ""
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return f"{_variable_of(settings_type, name, os.environ)}: {where}{errors[0]['msg']}{more}"


def _not_json(settings_type: type[ServiceSettings], text: str) -> str:
    """Describe an error of pydantic-settings. Only the error's `text` names the field."""
    found = re.search(r'field "(\w+)"', text)
    return f"{_variable_of(settings_type, found[1], os.environ)}: not JSON" if found else text


def _variable_of(
    settings_type: type[ServiceSettings], name: str, environment: Mapping[str, str]
) -> str:
    own = f"{settings_type.model_config.get('env_prefix', '')}{name.upper()}"
    plain = f"{SHARED_PREFIX}{name.upper()}"
    return plain if own not in environment and plain in environment else own

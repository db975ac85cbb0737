"""Reads and checks the file that describes the hosts of a mesh (docs/deploy.md).

For each host, the file says how many processes of each kind the host runs. A NATS cluster, and
Redis with its replicas and sentinels, run on the hosts that `servers` names. By default, these are
the first three hosts.
"""

from __future__ import annotations

import ipaddress
import json
import re
from typing import Annotated, Final, Self

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from pdmesh.core.access.exposure import is_loopback
from pdmesh.errors import InvalidRequest

_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?")
_CLUSTER_SIZES: Final = (3, 5)  # a majority is left when one server is lost
_FOLDERS: Final = frozenset({"authority", "admin"})  # folders beside those of the hosts
_MAX_HOSTS: Final = 256
_Count = Annotated[int, Field(ge=0, le=4096)]
_Port = Annotated[int, Field(ge=1, le=65_535)]


def _address(text: str) -> str:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        raise ValueError("must be an IP address") from None
    if is_loopback(text) or ipaddress.ip_address(text).is_unspecified:
        raise ValueError("must be an address that the other hosts reach")
    return text


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Host(_Part):
    """One host: its address for the other hosts, and the number of processes of each kind."""

    address: Annotated[str, AfterValidator(_address)]
    region: Annotated[str, Field(pattern=rf"^({_NAME.pattern})?$")] = ""
    gateways: _Count = 0
    masters: _Count = 0
    prefill: _Count = 0
    decode: _Count = 0
    fusion: _Count = 0
    encoder: _Count = 0
    pooling: _Count = 0
    blank: _Count = 0
    kv_cache_index: bool = False
    health_monitor: bool = False
    node_agent: bool = False


class ServerPorts(_Part):
    nats: _Port = 4222
    nats_cluster: _Port = 6222
    redis: _Port = 6379
    sentinel: _Port = 26379


class Layout(_Part):
    hosts: dict[str, Host]
    servers: tuple[str, ...] = ()  # names of hosts; empty: the first three
    ports: ServerPorts = ServerPorts()

    @property
    def server_hosts(self) -> tuple[str, ...]:
        """The names of the hosts with servers.

        The first one has Redis' primary at the first start.
        """
        return self.servers or tuple(self.hosts)[: _CLUSTER_SIZES[0]]

    def address(self, host: str) -> str:
        return self.hosts[host].address

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if bad := [name for name in self.hosts if not _NAME.fullmatch(name)]:
            raise ValueError(f"hosts: {bad[0]!r} is not a name (letters, digits and dashes)")
        if bad := [name for name in self.hosts if name in _FOLDERS]:
            raise ValueError(f"hosts: {bad[0]} names a folder that stays with the operator")
        if len(self.hosts) > _MAX_HOSTS:
            raise ValueError(f"hosts: more than {_MAX_HOSTS}")
        addresses = [host.address for host in self.hosts.values()]
        if twice := next((a for a in addresses if addresses.count(a) > 1), None):
            raise ValueError(f"hosts: {twice} is the address of two hosts")
        self._check_servers()
        for field in ("kv_cache_index", "health_monitor"):
            if sum(getattr(host, field) for host in self.hosts.values()) != 1:
                raise ValueError(f"hosts: one host must have {field}: true, and only one")
        if not any(host.masters for host in self.hosts.values()):
            raise ValueError("hosts: no host has masters")
        return self

    def _check_servers(self) -> None:
        names = self.server_hosts
        if unknown := [name for name in names if name not in self.hosts]:
            raise ValueError(f"servers: {unknown[0]} is not one of the hosts")
        if len(set(names)) != len(names):
            raise ValueError("servers: a host is named twice")
        if len(names) not in _CLUSTER_SIZES:
            raise ValueError(
                f"servers: {len(names)} hosts, but a cluster needs 3 or 5; for a mesh on one host, "
                "use pdmesh up --tls"
            )


def read(text: str) -> Layout:
    """Read the file's text. Raises InvalidRequest with the field's name."""
    try:
        data = yaml.load(text, Loader=yaml.CSafeLoader)
    except yaml.YAMLError as exc:
        raise InvalidRequest(f"not YAML: {exc}", field="hosts") from exc
    try:
        return Layout.model_validate_json(_as_json(data))
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        said = first["msg"].removeprefix("Value error, ")
        raise InvalidRequest(f"{where}: {said}" if where else said, field=where) from exc


def _as_json(data: object) -> str:
    """Convert to JSON, because a strict model accepts a list for a tuple only in JSON."""
    try:
        return json.dumps(data)
    except (TypeError, ValueError, RecursionError) as exc:
        raise InvalidRequest(f"only texts, numbers and flags are possible: {exc}") from exc

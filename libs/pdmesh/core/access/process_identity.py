"""Reads a process's identity from its certificate, and lists which roles may call each method.

A certificate names one process by a SPIFFE ID, `spiffe://TRUST-DOMAIN/ROLE/ID`. A service's role is
the service's name. A person's tools have the person's role: `viewer`, `operator` or `admin`.

The certificate also has a DNS name made of the same three parts. A process that calls another
checks this name, because TLS libraries compare DNS names but no URIs. The caller does not check the
other process's address, because the address may change.

A method that is not listed here may not be called.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from pdmesh.core.access.operator_roles import ROLES

TRUST_DOMAIN: Final = "pdmesh"  # by default

_LABEL: Final = r"[a-z0-9-]+"
_URI: Final = re.compile(rf"spiffe://([a-z0-9._-]+)/({_LABEL})/({_LABEL})")


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    role: str
    instance_id: str
    trust_domain: str = TRUST_DOMAIN

    @classmethod
    def from_uri(cls, uri: str) -> Self:
        """Raises ValueError if the URI does not name a process."""
        found = _URI.fullmatch(uri)
        if found is None:
            raise ValueError(f"{uri!r} is not spiffe://TRUST-DOMAIN/ROLE/ID")
        trust_domain, role, instance_id = found.groups()
        return cls(role, instance_id, trust_domain)

    def __str__(self) -> str:
        return f"{self.role}/{self.instance_id}"

    @property
    def uri(self) -> str:
        return f"spiffe://{self.trust_domain}/{self.role}/{self.instance_id}"

    @property
    def dns_name(self) -> str:
        return f"{self.instance_id}.{self.role}.{self.trust_domain}"

    @property
    def role_dns_name(self) -> str:
        """A DNS name that every certificate of the role contains.

        NATS' permissions for a whole role name the role by it.
        """
        return f"{self.role}.{self.trust_domain}"


def folder_of(root: Path, identity: ProcessIdentity) -> Path:
    """The folder with a process's certificate, below the folder of the mesh's own CA."""
    return root / identity.role / identity.instance_id


OPERATORS: Final = frozenset(ROLES)
PROXIES: Final = frozenset({"proxy"})  # Envoy, in front of the gateways
_INSTANCES: Final = frozenset({"prefill", "decode", "instance"})
_EVERYONE: Final = None

# The keys are services and methods. A method's entry overrides its service's entry. None means that
# the port is public. Other rules protect such a port.
_CALLERS: Final[Mapping[str, frozenset[str] | None]] = {
    "/pdmesh.v1.InstanceService/Session": frozenset({"gateway", "health-monitor"}),
    "/pdmesh.v1.InstanceService/GetStatus": OPERATORS,
    "/pdmesh.v1.InstanceService/GetKvSnapshot": frozenset({"master-scheduler", "kv-cache-index"}),
    "/pdmesh.v1.InstanceService/GetModelText": frozenset({"gateway"}),
    "/pdmesh.v1.InstanceService/InspectAdapter": frozenset({"master-scheduler"}),
    "/pdmesh.v1.SchedulerService/Plan": frozenset({"gateway"}),
    "/pdmesh.v1.SchedulerService/PlanStream": frozenset({"gateway"}),
    "/pdmesh.v1.SchedulerService/MatchPrefix": frozenset({"gateway"}),
    "/pdmesh.v1.SchedulerService/ListGroups": OPERATORS,
    "/pdmesh.v1.AdminService": OPERATORS,
    "/pdmesh.v1.KvIndexService/Match": _INSTANCES,
    "/pdmesh.v1.KvIndexService/Snapshot": frozenset({"master-scheduler"}),
    "/pdmesh.v1.InferenceService": _EVERYONE,
    "/grpc.health.v1.Health": _EVERYONE,
    # A setting of the endpoint picker, which chooses a gateway for a proxy, restricts this service
    # to PROXIES.
    "/envoy.service.ext_proc.v3.ExternalProcessor": _EVERYONE,
}


def callers_of(method: str) -> frozenset[str] | None:
    """The roles that may call a method, `/package.Service/Method`. None means that its port is
    public.
    """
    service = method.rpartition("/")[0]
    return _CALLERS.get(method, _CALLERS.get(service, frozenset()))

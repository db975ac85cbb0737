"""Turns the user's options into the list of a mesh's processes.

The services get their settings through environment variables, as in every deployment. Processes
start in the order of the list. They stop in tiers: gateways first, servers last.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Final, Literal

from pdmesh.config import SHARED_PREFIX, without_password
from pdmesh.core.access.process_identity import ProcessIdentity, folder_of
from pdmesh.core.groups.kv_options import KV_OPTIONS, OptionText, kv_split

EngineKind = Literal["vllm", "sim"]


class StopOrder(IntEnum):
    """The tiers of processes. A higher tier depends on the lower ones, so it stops first."""

    SERVER = 0
    CONTROL = 1
    INSTANCE = 2
    GATEWAY = 3


# The longest time that a process may take to end after SIGTERM, before it is killed. Instances and
# gateways have 10 s to drain, plus a margin.
STOP_GRACE_S: Final = {
    StopOrder.SERVER: 3.0,
    StopOrder.CONTROL: 4.0,
    StopOrder.INSTANCE: 13.0,
    StopOrder.GATEWAY: 13.0,
}


@dataclass(frozen=True)
class MeshSpec:
    """The user's options.

    For a port of 0, a free port is chosen. `env` has environment variables for all services.
    `service_env` has variables for one kind of service or for one process, by its name (`prefill`,
    `prefill-0`).
    """

    engine: EngineKind = "vllm"
    num_prefill: int = 1
    num_decode: int = 1
    num_fusion: int = 0
    num_encoder: int = 0  # instances that encode images for the prefills
    num_pooling: int = 0  # instances that make vectors or scores
    pooling_model_dir: Path | None = None  # None: pooling instances load the others' model
    num_blank: int = 0  # instances whose role the master assigns
    groups_file: Path | None = None  # the desired groups, which are applied once a master leads
    num_gateways: int = 1
    node_agent: bool = False  # watch this machine's devices
    num_masters: int = 1  # one leads, the others stand by
    has_index: bool = True  # a kv-cache-index; only one host of a mesh has one
    has_monitor: bool = True  # a health-monitor; only one host of a mesh has one
    host_folder: Path | None = None  # made by `pdmesh hosts`, for a mesh over several hosts
    host_name: str = ""  # prefix of the names of this host's processes
    host_region: str = ""
    regions: tuple[str, ...] = ()  # numbers of instances, gateways and masters are per region
    host: str = "127.0.0.1"  # the gateways' address for clients
    inner_host: str = "127.0.0.1"  # the processes' address for each other
    http_port: int = 8000
    grpc_port: int = 8001
    model_dir: Path | None = None  # a Hugging Face directory; the sim engine has a built-in model
    model_name: str | None = None
    dtype: str | None = None
    engine_args: Mapping[str, str] = field(default_factory=dict)  # vLLM arguments of all instances
    tool_parser: str | None = None  # as vLLM names it; None: the gateway's own setting
    reasoning_parser: str | None = None
    nats_url: str | None = None  # an external server instead of an embedded one
    redis_url: str | None = None
    keys_file: Path | None = None  # API keys and tenants; without it, all callers are admitted
    # Admit callers without keys even on an address that other machines can reach.
    allow_anonymous: bool = False
    tls: bool = False  # mutual TLS between the processes, with certificates made by the launcher
    insecure_network: bool = False  # allow plain text on addresses that others can reach
    start_timeout_s: float = 180.0
    env: Mapping[str, str] = field(default_factory=dict)
    service_env: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


_OPTIONS: Final = {
    "--engine": "engine",
    "--prefill": "num_prefill",
    "--decode": "num_decode",
    "--fusion": "num_fusion",
    "--encoder": "num_encoder",
    "--pooling": "num_pooling",
    "--pooling-model": "pooling_model_dir",
    "--blank": "num_blank",
    "--groups": "groups_file",
    "--gateways": "num_gateways",
    "--node-agent": "node_agent",
    "--masters": "num_masters",
    "--host-folder": "host_folder",
    "--regions": "regions",
    "--host": "host",
    "--inner-host": "inner_host",
    "--http-port": "http_port",
    "--grpc-port": "grpc_port",
    "--model": "model_dir",
    "--dtype": "dtype",
    "--engine-arg": "engine_args",
    "--tool-parser": "tool_parser",
    "--reasoning-parser": "reasoning_parser",
    "--nats-url": "nats_url",
    "--redis-url": "redis_url",
    "--keys": "keys_file",
    "--allow-anonymous": "allow_anonymous",
    "--tls": "tls",
    "--insecure-network": "insecure_network",
}


def asked_of(spec: MeshSpec) -> dict[str, str]:
    """The options as text, for display and for a comparison with another mesh's options."""

    def text(value: object) -> str:
        if isinstance(value, tuple):
            return ",".join(value)
        if isinstance(value, Mapping):
            return ",".join(f"{name}={each}" for name, each in value.items())
        shown = value.absolute() if isinstance(value, Path) else value
        return "none" if shown is None else without_password(str(shown))

    return {option: text(getattr(spec, name)) for option, name in _OPTIONS.items()}


@dataclass(frozen=True)
class ProcessSpec:
    """One process that the supervisor keeps running."""

    name: str
    service: str  # gateway, master-scheduler, ..., or nats, valkey
    tier: StopOrder
    command: tuple[str, ...]
    env: Mapping[str, str]
    ops_file: Path | None = None  # a service writes its ops address here; None for a server
    region: str = ""


@dataclass(frozen=True)
class Ports:
    """The ports of the gateways of one region."""

    http: int
    grpc: int


@dataclass(frozen=True)
class Wiring:
    """The addresses and secrets that the launcher chose for all processes."""

    nats_url: str
    redis_url: str
    ports: Mapping[str, Ports]  # by region
    hash_secret: str
    mesh_token: str
    state_dir: Path
    model_dir: Path
    tls_dir: Path | None = None  # the folder of the mesh's authority; None: no TLS
    nats_roles: bool = False  # whether NATS identifies processes by their certificates
    redis_urls: Mapping[str, str] = field(default_factory=dict)  # by service


_TIERS: Final = {
    "master-scheduler": StopOrder.CONTROL,
    "kv-cache-index": StopOrder.CONTROL,
    "health-monitor": StopOrder.CONTROL,
    "node-agent": StopOrder.CONTROL,
    "prefill": StopOrder.INSTANCE,
    "decode": StopOrder.INSTANCE,
    "instance": StopOrder.INSTANCE,
    "gateway": StopOrder.GATEWAY,
}

# Pooling instances may load the same model as the other instances. They serve the model under its
# name with this suffix.
_POOLING_SUFFIX: Final = "-embed"
_MODULES: Final = {
    "node-agent": ("pdmesh.services.health_monitor", "--node")
}  # others: pdmesh.services.<service>


def services(spec: MeshSpec, wiring: Wiring) -> list[ProcessSpec]:
    """Every service process, in start order."""
    return [_service(planned, spec, wiring) for planned in planned_services(spec)]


@dataclass(frozen=True)
class PlannedService:
    """A service process whose addresses are not known yet."""

    name: str
    kind: str  # the name without the prefix of its host or region
    service: str
    region: str

    @property
    def identity(self) -> ProcessIdentity:
        return ProcessIdentity(self.service, self.name)


def planned_services(spec: MeshSpec) -> list[PlannedService]:
    """All service processes, in start order.

    A process's name begins with the name of its host, if the mesh has several hosts, or else with
    the name of its region.
    """
    control = [
        (name, name)
        for name, is_wanted in (
            ("kv-cache-index", spec.has_index),
            ("health-monitor", spec.has_monitor),
            ("node-agent", spec.node_agent),
        )
        if is_wanted
    ]
    masters = [
        (f"master-scheduler-{i}" if i else "master-scheduler", "master-scheduler")
        for i in range(spec.num_masters)
    ]
    instances = [
        (f"{kind}-{i}", service)
        for kind, service, count in (
            ("fusion", "prefill", spec.num_fusion),
            ("prefill", "prefill", spec.num_prefill),
            ("decode", "decode", spec.num_decode),
            ("encoder", "instance", spec.num_encoder),
            ("pooling", "instance", spec.num_pooling),
            ("instance", "instance", spec.num_blank),
        )
        for i in range(count)
    ]
    gateways = [(f"gateway-{i}", "gateway") for i in range(spec.num_gateways)]
    regions = spec.regions or (spec.host_region,)
    parts = ((masters, regions), (control, ("",)), (instances, regions), (gateways, regions))
    return [
        PlannedService(_named(kind, region, spec), kind, service, region)
        for named, places in parts
        for region in places
        for kind, service in named
    ]


def _named(kind: str, region: str, spec: MeshSpec) -> str:
    start = spec.host_name or region
    return f"{start}-{kind}" if start else kind


def unpaired(processes: Iterable[ProcessSpec]) -> str:
    """A text about an option that keeps prefills and decodes from exchanging KV. Empty if none."""
    by_role = {
        process.service: process
        for process in processes
        if process.service in ("prefill", "decode")
        and process.env.get("PDMESH_PREFILL_ROLE") != "fusion"
    }
    if len(by_role) < 2:
        return ""
    splits = (
        kv_split(name, _option_of(by_role["prefill"], name), _option_of(by_role["decode"], name))
        for name in KV_OPTIONS
    )
    return next(filter(None, splits), "")


def _option_of(process: ProcessSpec, option: str) -> OptionText:
    name = option.upper()
    variables = (f"{SHARED_PREFIX}{process.service.upper()}_{name}", f"{SHARED_PREFIX}{name}")
    given = next((v for v in variables if process.env.get(v)), variables[0])
    return OptionText(given, process.env.get(given, ""))


def _service(planned: PlannedService, spec: MeshSpec, wiring: Wiring) -> ProcessSpec:
    name, kind, service = planned.name, planned.kind, planned.service
    region = planned.region
    module = service.replace("-", "_")
    prefix = f"PDMESH_{module.upper()}_"
    ops_file = wiring.state_dir / "run" / f"{name}.ops"
    own = {
        "INSTANCE_ID": name,
        "OPS_FILE": str(ops_file),
        **_tls_settings(service, name, wiring),
        **({"REDIS_URL": wiring.redis_urls[service]} if service in wiring.redis_urls else {}),
        **({"REGION": region} if region else {}),
        **(_keys(spec) if service in ("gateway", "master-scheduler") else {}),
        **(_gateway_settings(region, spec, wiring) if service == "gateway" else {}),
        **(_instance_settings(kind, spec, wiring) if _TIERS[service] is StopOrder.INSTANCE else {}),
    }
    return ProcessSpec(
        name=name,
        service=service,
        tier=_TIERS[service],
        command=(sys.executable, "-m", *_MODULES.get(service, (f"pdmesh.services.{module}",))),
        env={
            **os.environ,
            **_common_settings(spec, wiring),
            **{f"{prefix}{key}": value for key, value in own.items()},
            **spec.env,
            **spec.service_env.get(service, {}),
            **spec.service_env.get(name, {}),
        },
        ops_file=ops_file,
        region=region,
    )


def _tls_settings(service: str, name: str, wiring: Wiring) -> dict[str, str]:
    if wiring.tls_dir is None:
        return {}
    return {"TLS_DIR": str(folder_of(wiring.tls_dir, ProcessIdentity(service, name)))}


def _common_settings(spec: MeshSpec, wiring: Wiring) -> dict[str, str]:
    return {
        "PDMESH_INNER_HOST": spec.inner_host,
        **({"PDMESH_NODE_ID": spec.host_name} if spec.host_name else {}),
        "PDMESH_NATS_URL": wiring.nats_url,
        **({"PDMESH_NATS_ROLES": "true"} if wiring.nats_roles else {}),
        **({"PDMESH_REDIS_URL": wiring.redis_url} if wiring.redis_url else {}),
        "PDMESH_HASH_SECRET": wiring.hash_secret,
        "PDMESH_MESH_TOKEN": wiring.mesh_token,
        **({"PDMESH_INSECURE_NETWORK": "true"} if spec.insecure_network else {}),
        "PDMESH_STATE_DIR": str(wiring.state_dir),
        "PDMESH_LOG_FORMAT": "json",
        "PYTHONUNBUFFERED": "1",
        # Python must find the packages even if pdmesh runs from a checkout without installation.
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "PDMESH_MODEL_DIR": str(wiring.model_dir),
        "PDMESH_MODEL": spec.model_name or wiring.model_dir.name,
    }


def _keys(spec: MeshSpec) -> dict[str, str]:
    return {"KEYS_FILE": str(spec.keys_file.absolute())} if spec.keys_file else {}


def _gateway_settings(region: str, spec: MeshSpec, wiring: Wiring) -> dict[str, str]:
    ports = wiring.ports[region if spec.regions else ""]
    return {
        **({"ALLOW_ANONYMOUS": "true"} if spec.allow_anonymous else {}),
        **({"TOOL_PARSER": spec.tool_parser} if spec.tool_parser else {}),
        **({"REASONING_PARSER": spec.reasoning_parser} if spec.reasoning_parser else {}),
        "HOST": spec.host,
        "HTTP_PORT": str(ports.http),
        "GRPC_PORT": str(ports.grpc),
        "REUSE_PORT": str(spec.num_gateways > 1).lower(),
        "MODEL_DIR": str(wiring.model_dir),
    }


def _instance_settings(kind: str, spec: MeshSpec, wiring: Wiring) -> dict[str, str]:
    settings: dict[str, str] = {"ENGINE": spec.engine}
    if kind.startswith("fusion-"):
        settings["ROLE"] = "fusion"
    if kind.startswith("encoder-"):
        settings["ROLE"] = "encoder"
    if kind.startswith("pooling-"):
        folder = spec.pooling_model_dir
        common = spec.model_name or wiring.model_dir.name
        settings["ROLE"] = "pooling"
        settings["MODEL"] = folder.name if folder else f"{common}{_POOLING_SUFFIX}"
        settings |= {"MODEL_DIR": str(folder)} if folder else {}
    if spec.dtype:
        settings["DTYPE"] = spec.dtype
    if spec.engine_args and "MODEL_DIR" not in settings:  # the arguments are for the common model
        settings["ENGINE_ARGS"] = json.dumps(dict(spec.engine_args))
    return settings

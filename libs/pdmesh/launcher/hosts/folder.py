"""The folder of one host (a machine of the mesh).

`pdmesh hosts prepare` writes the folder, and `pdmesh up --host-folder` reads it:

    host.json          the host's name, what it runs, addresses, secrets
    tls/ROLE/ID        the certificates of the host's processes, and one with the role `viewer` for
                       commands on this host

Hosts with servers also have:

    cluster-tls/       NATS' certificate for connections to the cluster's other servers. A
                       separate authority signs it, so that no other process can join as a server.
    accounts.conf      the permissions of NATS' users
    redis.acl          the permissions of Redis' users
    sentinel.acl       the permissions of the users of Redis' sentinels

Only the user who runs the host may read the folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Self

from pdmesh.atomic_file import write_atomically
from pdmesh.core.access.operator_roles import AdminRole
from pdmesh.core.access.process_identity import ProcessIdentity, folder_of
from pdmesh.errors import MeshError
from pdmesh.launcher.hosts.layout import Host, Layout
from pdmesh.launcher.spec import MeshSpec
from pdmesh.net.addresses import join

PRIMARY: Final = "pdmesh"  # the sentinels' name for Redis' primary
REPLICA_USER: Final = "replica"
SENTINEL_USER: Final = "sentinel"
SERVICES_WITH_REDIS: Final = ("gateway", "kv-cache-index")


class BadHostFolder(MeshError):
    """This release's `pdmesh hosts prepare` did not make the folder, or the folder is damaged."""

    default_reason = "BAD_HOST_FOLDER"


@dataclass(frozen=True)
class MeshSecrets:
    """The secrets of the whole mesh. `passwords` has a password for each user of Redis."""

    hash_secret: str = field(repr=False)
    mesh_token: str = field(repr=False)
    passwords: Mapping[str, str] = field(repr=False)


@dataclass(frozen=True)
class HostFolder:
    path: Path
    name: str
    layout: Layout
    secrets: MeshSecrets

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the folder. Raises BadHostFolder, whose message names the file."""
        file = path / "host.json"
        try:
            data: dict[str, Any] = json.loads(file.read_text())
            layout = Layout.model_validate_json(json.dumps(data["layout"]))
            found = cls(path.absolute(), data["name"], layout, MeshSecrets(**data["secrets"]))
            assert found.host is not None
        except OSError as exc:
            raise BadHostFolder(f"{file}: {exc.strerror}") from exc
        except (ValueError, TypeError, KeyError) as exc:
            raise BadHostFolder(
                f"{file} is not of this release: make it again with pdmesh hosts prepare"
            ) from exc
        return found

    def write(self) -> None:
        """Raises OSError."""
        text = {
            "name": self.name,
            "layout": self.layout.model_dump(mode="json"),
            "secrets": asdict(self.secrets),
        }
        write_atomically(self.path / "host.json", json.dumps(text, indent=2) + "\n")

    @property
    def host(self) -> Host:
        return self.layout.hosts[self.name]

    @property
    def has_servers(self) -> bool:
        return self.name in self.layout.server_hosts

    @property
    def tls_dir(self) -> Path:
        return self.path / "tls"

    @property
    def of_commands(self) -> Path:
        """The folder of the certificate that commands on this host use. Its role may only read."""
        return folder_of(self.tls_dir, viewer_of(self.name))

    @property
    def nats_url(self) -> str:
        return "tls://" + ",".join(self._nearest_first(self.layout.ports.nats))

    def redis_url(self, role: str) -> str:
        """The URL of Redis, with the user and password of the role."""
        sentinels = ",".join(self._nearest_first(self.layout.ports.sentinel))
        password = self.secrets.passwords[role]
        return f"rediss-sentinel://{role}:{password}@{sentinels}/0?primary={PRIMARY}"

    def _nearest_first(self, port: int) -> list[str]:
        """The servers' addresses: this host's server, then servers of its region, then the rest."""
        region = self.host.region

        def distance(name: str) -> int:
            return 0 if name == self.name else 1 if self.layout.hosts[name].region == region else 2

        names = sorted(self.layout.server_hosts, key=distance)
        return [join(self.layout.address(name), port) for name in names]

    def spec(self, asked: MeshSpec) -> MeshSpec:
        """The options for this host: `asked`, with the host's own numbers of processes."""
        return replace(host_spec(self.name, self.host, asked), host_folder=self.path)


def host_spec(name: str, host: Host, asked: MeshSpec) -> MeshSpec:
    return replace(
        asked,
        num_prefill=host.prefill,
        num_decode=host.decode,
        num_fusion=host.fusion,
        num_encoder=host.encoder,
        num_pooling=host.pooling,
        num_blank=host.blank,
        num_gateways=host.gateways,
        num_masters=host.masters,
        has_index=host.kv_cache_index,
        has_monitor=host.health_monitor,
        node_agent=host.node_agent,
        host_name=name,
        host_region=host.region,
        inner_host=host.address,
        tls=True,
    )


def viewer_of(name: str) -> ProcessIdentity:
    return ProcessIdentity(str(AdminRole.VIEWER), name)


def nats_of(name: str) -> ProcessIdentity:
    return ProcessIdentity("nats", name)


def redis_of(name: str) -> ProcessIdentity:
    return ProcessIdentity("redis", name)

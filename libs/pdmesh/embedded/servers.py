"""The commands and checks for the NATS and Valkey servers of a mesh on one machine.

Each server keeps its address across restarts. Valkey has a unix socket that only this user can
open, and no TCP port, so it needs no password. NATS has a reserved port of 127.0.0.1, which every
user of the machine can reach. Write access to NATS is admin access to the mesh, so NATS requires a
password. The password is in the server's URL and in a file that only this user can read.

If the mesh has TLS, NATS identifies its clients by their certificates instead, with the permissions
of an accounts file. Valkey then has a user and a password for each role that uses it.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import ssl
import tempfile
from collections.abc import Awaitable, Iterable, Sequence
from pathlib import Path
from typing import Final, Protocol

from pdmesh.atomic_file import write_atomically
from pdmesh.embedded.binaries import NATS, VALKEY, find
from pdmesh.embedded.ports import PortReservation
from pdmesh.errors import BadCertificates
from pdmesh.server_permissions.redis_acl import redis_acl

_SOCKET_PATH_MAX: Final = 100  # bytes; the system's limit is 108 on Linux, 104 on macOS
_PROBE_S: Final = 0.5
_NATS_USER: Final = "pdmesh"
NO_USER: Final = b"-NOAUTH"  # Valkey's answer to a client without a user

_NATS_CONFIG: Final = """\
listen: "{address}"
server_name: pdmesh
{who}
{tls}max_payload: 8MB
write_deadline: "2s"
jetstream {{
  store_dir: "{store}"
  max_mem: 64MB
  max_file: 1GB
}}
"""


# With `handshake_first`, a connection begins with the TLS handshake. So nobody on the network can
# make a client continue without TLS.
_NATS_TLS: Final = """\
tls {{
  cert_file: "{folder}/tls.crt"
  key_file: "{folder}/tls.key"
  ca_file: "{folder}/ca.crt"
  {verify}: true
  handshake_first: true
}}
"""


class Server(Protocol):
    """A server program with a fixed address."""

    name: str

    @property
    def url(self) -> str: ...

    def command(self) -> list[str]:
        """Write the server's files, and return the command that starts the server.

        Raises `ServerNotFound`.
        """
        ...

    async def is_ready(self) -> bool: ...

    async def is_alive(self) -> bool:
        """Whether the process answers. A process that does not answer may be killed."""
        ...

    def close(self) -> None: ...


async def shakes_hands(host: str, port: int) -> bool:
    """Whether a server with TLS answers. Certificates are not checked."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        async with asyncio.timeout(_PROBE_S):
            _, writer = await asyncio.open_connection(host, port, ssl=context)
    except ssl.SSLError:
        return True
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


class NatsServer:
    """nats-server with JetStream in `directory`."""

    name = "nats"

    def __init__(
        self,
        directory: Path,
        port: int = 0,
        tls_dir: Path | None = None,
        accounts: Path | None = None,
    ) -> None:
        """Reserve the port.

        `tls_dir` has the server's certificate, which the readiness check also uses as its client
        certificate. None means no TLS. `accounts` is a file made by
        `server_permissions.nats_accounts`, which needs TLS. Without `accounts`, all clients have
        the same user.
        """
        self._directory, self._tls_dir, self._accounts = directory, tls_dir, accounts
        self._port = PortReservation("127.0.0.1", port, "PDMESH_NATS_PORT")
        self._password = secrets.token_hex(16)

    @property
    def url(self) -> str:
        scheme = "nats" if self._tls_dir is None else "tls"
        if self._accounts is not None:
            return f"{scheme}://{self._port.address}"
        return f"{scheme}://{_NATS_USER}:{self._password}@{self._port.address}"

    def command(self) -> list[str]:
        binary = find(NATS)
        make_private(self._directory)
        config = self._directory / "nats.conf"
        store = (self._directory / "jetstream").absolute()
        text = _NATS_CONFIG.format(
            address=self._port.address, store=store, who=self._who(), tls=self._tls()
        )
        write_atomically(config, text)  # only this user can read it
        return [str(binary), "-c", str(config.absolute())]

    def _who(self) -> str:
        if self._accounts is not None:  # the path is relative to the folder of the configuration
            return f'include "{os.path.relpath(self._accounts, self._directory)}"'
        return f'authorization {{ user: "{_NATS_USER}", password: "{self._password}" }}'

    def _tls(self) -> str:
        if self._tls_dir is None:
            return ""
        verify = "verify" if self._accounts is None else "verify_and_map"
        return _NATS_TLS.format(folder=self._tls_dir.absolute(), verify=verify)

    async def is_ready(self) -> bool:
        """Whether the server sends INFO, which it does once JetStream runs."""
        try:
            context = None if self._tls_dir is None else context_of(self._tls_dir)
        except (BadCertificates, OSError):
            return False
        connecting = asyncio.open_connection(self._port.host, self._port.port, ssl=context)
        return await says(connecting, b"", (b"INFO ",))

    async def is_alive(self) -> bool:
        """Whether the server answers, even if its certificate is not accepted."""
        if self._tls_dir is None:
            return await self.is_ready()
        return await shakes_hands(self._port.host, self._port.port)

    def close(self) -> None:
        self._port.close()


class ValkeyServer:
    """valkey-server or redis-server on a unix socket, without data on disk."""

    name = "valkey"

    def __init__(self, directory: Path, roles: Iterable[str] = ()) -> None:
        """Each of the `roles` gets a user with a new password (`server_permissions.redis_acl`).

        Without roles, Valkey does not distinguish its clients.
        """
        self._directory = directory
        self._socket = _socket_path(directory)
        self._passwords = {role: secrets.token_hex(16) for role in roles}

    @property
    def url(self) -> str:
        """The URL without a user."""
        return f"unix://{self._socket}"

    @property
    def urls(self) -> dict[str, str]:
        """The URL with the user of each role, by role."""
        return {
            role: f"unix://{role}:{password}@{self._socket}"
            for role, password in self._passwords.items()
        }

    def command(self) -> list[str]:
        binary = find(VALKEY)
        make_private(self._directory)
        make_private(self._socket.parent)
        self._socket.unlink(missing_ok=True)
        return [
            str(binary), "--port", "0", "--unixsocket", str(self._socket), "--unixsocketperm",
            "700",
            "--save", "", "--appendonly", "no", "--dir", str(self._directory.absolute()),
            *self._acl(),
        ]  # fmt: skip

    def _acl(self) -> list[str]:
        if not self._passwords:
            return []
        file = self._directory.absolute() / "users.acl"
        write_atomically(file, redis_acl(self._passwords))
        return ["--aclfile", str(file)]

    async def is_ready(self) -> bool:
        return await says(
            asyncio.open_unix_connection(self._socket), b"PING\r\n", (b"+PONG", NO_USER)
        )

    async def is_alive(self) -> bool:
        return await self.is_ready()

    def close(self) -> None:
        self._socket.unlink(missing_ok=True)


def context_of(tls_dir: Path) -> ssl.SSLContext:
    """Raises BadCertificates, OSError."""
    from pdmesh.net.tls.certificate_renewal import CertificateFolder
    from pdmesh.net.tls.contexts import client_context

    return client_context(CertificateFolder(tls_dir))


async def says(
    connecting: Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]],
    question: bytes,
    answers: Sequence[bytes],
) -> bool:
    """Connect and send `question`. Returns whether the reply begins like one of the `answers`."""
    try:
        async with asyncio.timeout(_PROBE_S):
            reader, writer = await connecting
            try:
                writer.write(question)
                said = await reader.readexactly(min(map(len, answers)))
                return any(answer.startswith(said) for answer in answers)
            finally:
                writer.close()
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        return False


def make_private(directory: Path) -> None:
    """Make `directory` private. Raises PermissionError if it belongs to another user."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if directory.stat().st_uid != os.getuid():
        raise PermissionError(f"{directory} belongs to another user")
    directory.chmod(0o700)


def _socket_path(directory: Path) -> Path:
    """A path in `directory`, or in a private temporary directory if the path would be too long."""
    path = directory.absolute() / "valkey.sock"
    if len(os.fsencode(path)) <= _SOCKET_PATH_MAX:
        return path
    digest = hashlib.blake2b(os.fsencode(path), digest_size=8).hexdigest()
    return Path(tempfile.gettempdir(), f"pdmesh-{os.getuid()}-{digest}", "valkey.sock")

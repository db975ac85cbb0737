"""Connects a command to a mesh's NATS server, or fails with one clear line."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from pdmesh.cli.errors import CommandFailed, no_mesh
from pdmesh.client.client import reach_nats
from pdmesh.config import BadSetting, is_set
from pdmesh.errors import BadCertificates, InvalidRequest, Unavailable
from pdmesh.launcher import state
from pdmesh.net.grpc import rpc
from pdmesh.net.nats.bus import NatsBus
from pdmesh.net.tls.own_certificate import use_certificates

if TYPE_CHECKING:
    from pdmesh.net.tls.certificate_renewal import CertificateFolder


def be_quiet() -> None:
    """Silence the log lines of libraries, which would interrupt the command's own output."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


@asynccontextmanager
async def connected(options: argparse.Namespace) -> AsyncIterator[NatsBus]:
    """Connect to the NATS at --nats-url, or to the NATS of the mesh that was started here.

    This also sets the mesh token and the certificate for the command's further calls. The token
    comes from the environment, or else from the mesh started here. The certificate comes from the
    folder PDMESH_TLS_DIR, or else from the mesh started here. Raises CommandFailed.
    """
    url, tls_dir = options.nats_url, os.environ.get("PDMESH_TLS_DIR", "")
    has_roles = is_set(os.environ, "PDMESH_NATS_ROLES")
    _use_mesh_token(options)
    if url is None:
        mesh = state.read(options.state_dir)
        if mesh is None:
            raise no_mesh(options.state_dir)
        url, tls_dir = mesh.nats_url, tls_dir or mesh.tls_dir
        has_roles = mesh.nats_roles
    be_quiet()
    use_certificates(_certificates(tls_dir), nats_roles=has_roles)
    try:
        bus = await reach_nats(url, "pdmesh-cli")
    except InvalidRequest as exc:
        raise CommandFailed(f"--nats-url or PDMESH_NATS_URL: {exc.message}") from exc
    except Unavailable as exc:
        raise CommandFailed(exc.message) from exc
    try:
        yield bus
    finally:
        await bus.close()


def _certificates(tls_dir: str) -> CertificateFolder | None:
    """Raises CommandFailed."""
    if not tls_dir:
        return None
    from pdmesh.net.tls.certificate_renewal import CertificateFolder

    try:
        return CertificateFolder(Path(tls_dir))
    except BadCertificates as exc:
        raise CommandFailed(exc.message) from exc


def _use_mesh_token(options: argparse.Namespace) -> None:
    """Use the mesh token from the environment, or else from the mesh started here."""
    try:
        token = state.known_mesh_token(options.state_dir, os.environ)
    except BadSetting as exc:
        raise CommandFailed(str(exc)) from exc
    rpc.use_mesh_token(token)

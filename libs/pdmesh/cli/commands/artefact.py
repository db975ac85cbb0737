"""`pdmesh artefact`: prepares a model's files for one role, or checks prepared files."""

from __future__ import annotations

import argparse

from pdmesh.cli.errors import CommandFailed
from pdmesh.instance.incarnation import artefact
from pdmesh.instance.incarnation.role_settings import RoleRefused


def run(options: argparse.Namespace) -> int:
    try:
        return {"build": _build, "verify": _verify}[options.action](options)
    except RoleRefused as exc:
        raise CommandFailed(f"{exc.reason}: {exc.message}") from exc
    except OSError as exc:
        raise CommandFailed(f"{exc.filename}: {exc.strerror}") from exc


def _build(options: argparse.Namespace) -> int:
    manifest = artefact.build(
        options.model_dir,
        options.role,
        options.out,
        model=options.name,
        config=dict(options.set or []),
    )
    print(manifest)
    return 0


def _verify(options: argparse.Namespace) -> int:
    found = artefact.read(options.manifest)
    artefact.verify(found)
    manifest = found.manifest
    print(f"{manifest.model} for {manifest.role}, revision {manifest.revision}: all files match")
    return 0

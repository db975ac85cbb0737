"""`pdmesh keys`: issues, lists and revokes the API keys in a key file.

Running gateways and masters read a changed file within two seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from pdmesh import api_keys
from pdmesh.cli.errors import CommandFailed
from pdmesh.cli.hints import hint
from pdmesh.cli.view.output import show
from pdmesh.cli.view.table import table
from pdmesh.core.access.operator_roles import ROLES
from pdmesh.core.tenancy.tenant import NAME
from pdmesh.launcher.state import make_private

_DAY_S: Final = 86400
_LIMITS: Final = (
    "requests_per_s",
    "tokens_per_min",
    "max_concurrent",
    "tokens_per_day",
    "weight",
    "priority",
    "models",
)


def run(options: argparse.Namespace) -> int:
    path: Path = options.file or options.state_dir / "keys.json"
    try:
        return {"add": _add, "list": _list, "revoke": _revoke}[options.action](options, path)
    except api_keys.BadKeyFile as exc:
        raise CommandFailed(str(exc)) from exc
    except OSError as exc:
        raise CommandFailed(f"cannot write {path}: {exc.strerror}") from exc


def _add(options: argparse.Namespace, path: Path) -> int:
    if not NAME.fullmatch(options.tenant):
        raise CommandFailed(
            "a tenant's name has 1 to 63 lower-case letters, digits or -, and no leading -",
            2,
        )
    expires_at = None
    if options.expires_days is not None:
        expires_at = int(time.time() + options.expires_days * _DAY_S)
    if options.file is None:
        make_private(options.state_dir)  # the key file is often the first file in this directory
    with _changing(path) as file:
        token = api_keys.issue(file, options.tenant, expires_at, ROLES.get(options.role))
        for limit in _LIMITS:
            if (value := getattr(options, limit)) is not None:
                setattr(file.tenants[options.tenant], limit, value)
    print(token)
    print(f"pdmesh: written to {path}; the key is not shown again", file=sys.stderr)
    return 0


def _list(options: argparse.Namespace, path: Path) -> int:
    if not path.exists():
        raise CommandFailed(f"no keys yet: make {path} with {_how_to_add(options)}")
    file = api_keys.load(path)
    show(options, _listed(file), lambda: _keys_text(file))
    return 0


def _how_to_add(options: argparse.Namespace) -> str:
    """The command that makes this key file."""
    file = f" --file {shlex.quote(str(options.file))}" if options.file is not None else ""
    return hint(options.state_dir, f"keys add TENANT{file}")


def _listed(file: api_keys.KeyFile) -> list[dict[str, Any]]:
    """The keys without their hashes. Each has its tenant's limits."""
    return [
        {
            "key_id": key.key_id,
            "tenant": key.tenant,
            "role": key.role,
            "created_at": _time(key.created_at),
            "expires_at": None if key.expires_at is None else _time(key.expires_at),
            "is_disabled": file.tenants[key.tenant].is_disabled,
            **{limit: getattr(file.tenants[key.tenant], limit) for limit in _LIMITS},
        }
        for key in file.keys
    ]


def _keys_text(file: api_keys.KeyFile) -> str:
    rows = []
    for key in file.keys:
        tenant = file.tenants[key.tenant]
        limits = (
            tenant.requests_per_s, tenant.tokens_per_min, tenant.max_concurrent,
            tenant.tokens_per_day,
        )  # fmt: skip
        rows.append(
            [
                key.key_id,
                key.tenant + (" (disabled)" if tenant.is_disabled else ""),
                key.role or "-",
                _date(key.created_at),
                "never" if key.expires_at is None else _date(key.expires_at),
                *("-" if limit is None else f"{limit:g}" for limit in limits),
                str(tenant.weight),
                str(tenant.priority),
            ]
        )
    header = [
        "KEY",
        "TENANT",
        "ROLE",
        "CREATED",
        "EXPIRES",
        "REQ/S",
        "TOKENS/MIN",
        "OPEN",
        "TOKENS/DAY",
    ]
    return table([*header, "WEIGHT", "PRIORITY"], rows)


def _revoke(options: argparse.Namespace, path: Path) -> int:
    with _changing(path) as file:
        if not api_keys.revoke(file, options.key_id):
            raise CommandFailed(f"there is no key {options.key_id} in {path}")
    print(f"pdmesh: {options.key_id} is revoked", file=sys.stderr)
    return 0


@contextlib.contextmanager
def _changing(path: Path) -> Iterator[api_keys.KeyFile]:
    """Lock and load the key file, and save it after the block, unless the block raises."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        file = api_keys.load(path) if path.exists() else api_keys.KeyFile()
        yield file
        api_keys.save(path, file)


def _time(at: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))


def _date(at: int) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(at))

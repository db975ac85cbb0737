"""The arguments of commands that manage pins, adapters, keys, artefacts and certificates."""

from __future__ import annotations

import os
from pathlib import Path

from pdmesh.cli import values
from pdmesh.cli.arguments import options
from pdmesh.cli.arguments.options import Commands
from pdmesh.cli.parser import CommandParser
from pdmesh.core.access.operator_roles import ROLES
from pdmesh.core.access.process_identity import TRUST_DOMAIN


def add_pins(commands: Commands) -> None:
    admin = options.of_admin()
    parser = commands.add_parser(
        "pins", parents=[admin], help="manage pinned prefixes, whose KV is not evicted"
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    add = actions.add_parser("add", parents=[admin], help="pin a prefix, or replace a pin")
    add.add_argument("pin", help="the pin's name: [a-z0-9-]+")
    prefix = add.add_mutually_exclusive_group(required=True)
    prefix.add_argument(
        "--system", type=Path, metavar="FILE", help="the system prompt of chats; - reads stdin"
    )
    prefix.add_argument("--text", type=Path, metavar="FILE", help="the beginning of a plain prompt")
    prefix.add_argument(
        "--token-ids", type=Path, metavar="FILE", help="token ids, separated by spaces or commas"
    )
    add.add_argument(
        "--tenant", default="default", help="tenant of the prompts (default: %(default)s)"
    )
    add.add_argument("--scenario", default="", help="pin only at instances of this scenario")
    add.add_argument("--model", default="", help="model of the prompts (default: the only model)")
    add.add_argument("--cache-salt", default="", help="the cache_salt of the prompts")
    add.add_argument(
        "--ttl",
        type=values.duration,
        default="24h",
        help="how long the pin lasts: 10s, 30m, 12h, 7d (default: 24h)",
    )
    add.add_argument("--reason", default="", help="a reason, recorded with the pin")
    add.add_argument("--url", help="URL of a gateway (default: the mesh started here)")
    add.add_argument(
        "--api-key",
        default=os.environ.get("PDMESH_API_KEY") or os.environ.get("PDMESH_TOKEN", ""),
        help="the API key, or a token of the OpenID provider (default: $PDMESH_API_KEY, else "
        "$PDMESH_TOKEN)",
    )
    shown = actions.add_parser(
        "list", parents=[admin, options.of_watch()], help="show pins and their holders"
    )
    remove = actions.add_parser("remove", parents=[admin], help="remove a pin")
    remove.add_argument("pin", help="the pin's name")
    for each in (add, shown, remove):
        each.set_defaults(module="pins")


def add_adapters(commands: Commands) -> None:
    admin = options.of_admin()
    parser = commands.add_parser(
        "adapters", parents=[admin], help="manage LoRA adapters, which clients name as models"
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    add = actions.add_parser("add", parents=[admin], help="serve an adapter, or replace it")
    add.add_argument("adapter", help="its name for clients: letters, digits, - and _")
    add.add_argument(
        "--model", default="", help="the model that it changes (default: the only one)"
    )
    add.add_argument(
        "--path",
        type=values.absolute_path,
        required=True,
        metavar="DIR",
        help="folder with adapter_config.json and adapter_model.safetensors, as instances see it",
    )
    shown = actions.add_parser(
        "list",
        parents=[admin, options.of_watch()],
        help="show adapters and the instances that have loaded them",
    )
    remove = actions.add_parser("remove", parents=[admin], help="stop serving an adapter")
    remove.add_argument("adapter", help="its name")
    for each in (add, shown, remove):
        each.set_defaults(module="adapters")


def add_keys(commands: Commands) -> None:
    parser = commands.add_parser("keys", parents=[options.of_state()], help="manage API keys")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    common = CommandParser(add_help=False, parents=[options.of_state()])
    common.add_argument(
        "--file", type=Path, help="the key file (default: keys.json in --state-dir)"
    )
    add = actions.add_parser("add", parents=[common], help="make a key and show it once")
    add.add_argument("tenant", help="the key's tenant; a new name adds a tenant")
    add.add_argument(
        "--expires-days",
        type=values.positive,
        metavar="DAYS",
        help="days until the key expires (default: never)",
    )
    add.add_argument(
        "--role",
        choices=list(ROLES),
        help="make it also a key for the admin API, with this role (default: for clients only)",
    )
    # These limits apply to all keys of the tenant together.
    add.add_argument(
        "--requests-per-s", type=values.positive, metavar="N", help="default: no limit"
    )
    add.add_argument(
        "--tokens-per-min",
        type=values.positive,
        metavar="N",
        help="tokens of prompts and answers (default: no limit)",
    )
    add.add_argument(
        "--max-concurrent",
        type=values.positive_int,
        metavar="N",
        help="open requests (default: no limit)",
    )
    add.add_argument(
        "--tokens-per-day",
        type=values.positive_int,
        metavar="N",
        help="tokens per UTC day (default: no limit)",
    )
    add.add_argument(
        "--weight",
        type=values.positive_int,
        metavar="N",
        help="the tenant's share of slots, relative to others, when calls wait (default: 1)",
    )
    add.add_argument(
        "--priority", type=values.count, metavar="N", help="0 is served first (default: 1)"
    )
    add.add_argument(
        "--models", nargs="+", metavar="MODEL", help="models that the tenant may use (default: all)"
    )
    actions.add_parser(
        "list", parents=[common, options.of_output()], help="list key ids, tenants and limits"
    )
    revoke = actions.add_parser("revoke", parents=[common], help="revoke a key")
    revoke.add_argument("key_id", help="the key's id, as in `pdmesh keys list`")


def add_artefact(commands: Commands) -> None:
    common = options.of_state()
    parser = commands.add_parser("artefact", parents=[common], help="prepare a model for one role")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    build = actions.add_parser(
        "build", parents=[common], help="make an artefact and print the path of its manifest"
    )
    build.add_argument("model_dir", type=Path, help="a Hugging Face model directory")
    roles = ["prefill", "decode", "fusion", "pooling", "encoder"]
    build.add_argument("--role", choices=roles, required=True)
    build.add_argument("--out", type=Path, required=True, help="a folder that does not exist yet")
    build.add_argument(
        "--name", default="", help="the model's name for clients (default: the folder's name)"
    )
    build.add_argument(
        "--set",
        type=values.assignment,
        action="append",
        metavar="NAME=VALUE",
        help="a setting of the engine that will load the artefact, e.g. dtype=float32; may be "
        "repeated",
    )
    verify = actions.add_parser(
        "verify", parents=[common], help="check every file against the manifest"
    )
    verify.add_argument("manifest", type=Path)


def add_certs(commands: Commands) -> None:
    parser = commands.add_parser(
        "certs", parents=[options.of_state()], help="make certificates for mutual TLS"
    )
    parser.add_argument(
        "processes",
        nargs="+",
        metavar="ROLE/ID",
        help="a process by its service and its name, e.g. prefill/prefill-0; admin/NAME, "
        "operator/NAME or viewer/NAME for people's commands",
    )
    parser.add_argument(
        "--name",
        action="append",
        default=[],
        metavar="NAME",
        help="a DNS name or an IP address of these processes; may be repeated",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="the authority's folder, made at first use (default: tls in the state directory)",
    )
    parser.add_argument(
        "--days",
        type=values.positive,
        default=365.0,
        help="how long the certificates are valid (default: %(default)g)",
    )


def add_hosts(commands: Commands) -> None:
    common = options.of_state()
    parser = commands.add_parser("hosts", parents=[common], help="set up a mesh over several hosts")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    prepare = actions.add_parser(
        "prepare",
        parents=[common],
        help="make a folder for each host, which you then copy to the host",
    )
    prepare.add_argument(
        "layout", type=Path, metavar="FILE", help="YAML file that describes the hosts"
    )
    prepare.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="where the folders go; it also keeps the mesh's certificate authority and secrets",
    )
    prepare.add_argument(
        "--days",
        type=values.positive,
        default=365.0,
        help="how long the certificates are valid (default: %(default)g)",
    )


def add_access(commands: Commands) -> None:
    common = options.of_state()
    parser = commands.add_parser(
        "access",
        parents=[common],
        help="print the permissions of processes, as files for NATS and Redis",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    nats = actions.add_parser("nats", parents=[common], help="print the accounts for NATS")
    nats.add_argument(
        "holders",
        nargs="*",
        metavar="ROLE[/ID]",
        help="the holder of one certificate, or of any certificate of a role (default: every role)",
    )
    nats.add_argument(
        "--trust-domain",
        default=TRUST_DOMAIN,
        metavar="NAME",
        help="the trust domain of the certificates (default: %(default)s)",
    )
    redis = actions.add_parser("redis", parents=[common], help="print the ACL file for Redis")
    redis.add_argument(
        "passwords",
        nargs="+",
        type=values.assignment,
        metavar="ROLE=FILE",
        help="a service that uses Redis, and the file with its password",
    )

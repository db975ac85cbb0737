"""The command line: the commands and their arguments."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from pdmesh import __version__
from pdmesh.cli import values
from pdmesh.cli.errors import CommandFailed
from pdmesh.cli.hints import default_state_dir
from pdmesh.errors import MeshError
from pdmesh.net import subjects

Command = Callable[[argparse.Namespace], int]


def main(arguments: Sequence[str] | None = None) -> None:
    _open_closed_streams()
    options = build_parser().parse_args(arguments)
    module = getattr(options, "module", options.command)
    try:
        _check_state_dir(options.state_dir)
        run: Command = import_module(
            f"pdmesh.cli.commands.{module}"
        ).run  # long enough for a Ctrl-C
        code = _flushed(run(options))
    except CommandFailed as exc:
        print(f"pdmesh: {exc}", file=sys.stderr)
        code = exc.code
    except MeshError as exc:
        print(f"pdmesh: {exc.message}", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:  # `pdmesh events | head`
        _mute()
        code = 0
    except OSError as exc:
        code = _explained(exc)
    sys.exit(code)


def _open_closed_streams() -> None:
    """Open streams that the caller closed, as in `pdmesh chat hi >&-`: Python lacks them then."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115  # until the end


def _explained(exc: OSError) -> int:
    """Explain an OSError: no permission, an impossible path, or no room for the output."""
    if exc.filename is None and _flushed(0):
        return 1
    where = f"{exc.filename}: " if exc.filename is not None else ""
    print(f"pdmesh: {where}{exc.strerror or exc}", file=sys.stderr)
    return 1


def _check_state_dir(state_dir: Path) -> None:
    for path in (state_dir, *state_dir.parents):
        if path.exists():
            if not path.is_dir():
                raise CommandFailed(f"--state-dir: {path} is not a directory")
            return


def _flushed(code: int) -> int:
    """Flush stdout and return the exit code. Raises BrokenPipeError."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as exc:
        print(f"pdmesh: cannot write to stdout: {exc.strerror}", file=sys.stderr)
        _mute()
        return code or 1
    return code


def _mute() -> None:
    """Drop the unwritten output: Python would otherwise try to write it again at its exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pdmesh", description="Prefill and decode on different instances, as a mesh."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    default = default_state_dir()
    where = f"where the mesh keeps its state and logs (default: {default})"
    parser.add_argument("--state-dir", type=Path, default=default, help=where)
    # The same options after the command and after its action; the later value wins.
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--state-dir", type=Path, default=argparse.SUPPRESS, help=where)
    _add_up(commands.add_parser("up", parents=[common], help="start a mesh on this machine"))
    down = commands.add_parser("down", parents=[common], help="stop the mesh")
    down.add_argument(
        "--timeout", type=values.positive, default=40.0, help="seconds until the mesh is killed"
    )
    _add_status(commands.add_parser("status", parents=[common], help="show what is running"))
    _add_chat(commands.add_parser("chat", parents=[common], help="ask the model a question"))
    _add_keys(commands.add_parser("keys", parents=[common], help="manage API keys"), common)
    _add_artefact(
        commands.add_parser("artefact", parents=[common], help="prepare a model for one role"),
        common,
    )
    _add_events(commands.add_parser("events", parents=[common], help="follow the mesh's events"))
    _add_admin(commands, common)
    return parser


def _add_up(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--engine",
        choices=["vllm", "sim"],
        default="vllm",
        help="the engine that computes tokens (default: vllm)",
    )
    add(
        "--prefill", type=values.count, metavar="N", help="prefill instances (default: 1; 2 on sim)"
    )
    add("--decode", type=values.count, metavar="M", help="decode instances (default: 1; 2 on sim)")
    add(
        "--fusion", action="store_true", help="start one instance for both phases instead of a pair"
    )
    add(
        "--encoder",
        type=values.count,
        default=0,
        metavar="N",
        help="instances that encode images for the prefills",
    )
    add(
        "--pooling",
        type=values.count,
        default=0,
        metavar="N",
        help="instances for embeddings, scores and reranking",
    )
    add(
        "--pooling-model",
        type=Path,
        metavar="DIR",
        help="the Hugging Face model directory of these (default: that of the others, under a name "
        "that ends in -embed)",
    )
    add(
        "--blank",
        type=values.count,
        default=0,
        metavar="N",
        help="instances whose role the master assigns",
    )
    add(
        "--groups",
        type=Path,
        metavar="FILE",
        help="a desired state to apply; it gives the instances their roles",
    )
    add(
        "--gateways",
        type=values.one_or_more,
        default=1,
        metavar="K",
        help="number of gateways; they share the ports",
    )
    add(
        "--regions",
        metavar="A,B",
        help="start the instances, gateways and masters in each of these regions (default: the "
        "regions in --groups)",
    )
    add(
        "--node-agent",
        action="store_true",
        help="start a node agent, which watches this machine's devices",
    )
    add(
        "--masters",
        type=values.one_or_more,
        default=1,
        metavar="L",
        help="number of masters; all but one are standbys",
    )
    add(
        "--host",
        default="127.0.0.1",
        help="address on which clients reach the gateways (default: %(default)s)",
    )
    add(
        "--inner-host",
        default=os.environ.get("PDMESH_INNER_HOST", "127.0.0.1"),
        metavar="HOST",
        help="address on which the mesh's processes reach each other (default: %(default)s)",
    )
    for port, default in (("http", "8000"), ("grpc", "8001")):
        add(
            f"--{port}-port",
            type=values.port,
            default=os.environ.get(f"PDMESH_{port.upper()}_PORT", default),
            metavar="PORT",
            help=f"{port.upper()} port of the gateways; 0 picks a free one (default: %(default)s)",
        )
    add("--model", type=Path, metavar="DIR", help="a Hugging Face model directory")
    add("--dtype", choices=["float32", "bfloat16", "float16"], help="number format of the model")
    add(
        "--engine-arg",
        type=values.assignment,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an argument of vLLM's for every instance, e.g. quantization=awq; may be repeated",
    )
    for kind, example in (("tool", "hermes"), ("reasoning", "qwen3")):
        add(
            f"--{kind}-parser",
            metavar="NAME",
            help=f"vLLM's {kind} parser, such as {example}; none: no parser (default: the one that "
            "the model's chat template tells)",
        )
    add("--nats-url", default=_nats_url(), help="use this NATS server instead of starting one")
    add(
        "--redis-url",
        default=os.environ.get("PDMESH_REDIS_URL") or None,
        help="use this Redis or Valkey server instead of starting one",
    )
    add(
        "--keys",
        type=Path,
        metavar="FILE",
        help="require API keys from this file (see pdmesh keys)",
    )
    add("--allow-anonymous", action="store_true", help="admit callers without keys")
    add(
        "--timeout",
        type=values.positive,
        default=300.0,
        help="longest wait until the mesh is ready, in seconds",
    )
    add(
        "--detach",
        action="store_true",
        help="return when the mesh is ready; stop it with pdmesh down",
    )


def _add_admin(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser
) -> None:
    """Commands that ask the leading master to show or change groups and instances."""
    admin = _admin_options(common, is_first=True)

    def add(name: str, help: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, parents=[admin], help=help)

    groups = add("groups", "show the groups and their members")
    shown = groups.add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="print JSON")
    groups.add_argument("--usage", action="store_true", help="show how long instances were used")
    shown.add_argument(
        "--text",
        type=values.version,
        nargs="?",
        const=0,
        metavar="VERSION",
        help="print the file of a version of the desired state (default: the current version)",
    )
    add("diff", "show what a file changes").add_argument(
        "file", type=Path, help="the file; - reads stdin"
    )
    apply = add("apply", "make a file the new desired state")
    apply.add_argument("file", type=Path, help="the file; - reads stdin")
    apply.add_argument(
        "--expect-version",
        type=values.version,
        metavar="N",
        help="refuse unless version N is current",
    )
    apply.add_argument(
        "--canary",
        type=values.share,
        default=0.0,
        metavar="SHARE",
        help="give the changed services only this share of the requests (e.g. 0.05) until pdmesh "
        "promote or rollback",
    )
    promote = add("promote", "roll a canary's revision out to all groups of its scenario")
    promote.add_argument(
        "scenario", nargs="?", default="", help="default: all scenarios with a canary"
    )
    rollback = add("rollback", "restore an earlier version of the desired state")
    rollback.add_argument(
        "version", type=values.version, nargs="?", default=0, help="default: the previous one"
    )
    for parser in (apply, rollback):
        parser.add_argument(
            "--allow-empty",
            action="store_true",
            help="accept a file without groups, which releases all instances",
        )
    _add_ratio(add("ratio", "show decisions about P:D ratios, or change groups by hand"))
    drain = add("drain", "take an instance out of service gracefully: it finishes its requests")
    cordon = add("cordon", "take an instance out of service at once: its requests move to others")
    uncordon = add("uncordon", "put a cordoned, drained or ejected instance back into service")
    for parser in (drain, cordon, uncordon):
        parser.add_argument("instance", help="the instance's name, as in pdmesh status")
    for parser in (apply, rollback, drain, cordon):
        parser.add_argument("--reason", default="", help="a reason, recorded with the change")
    pins = add("pins", "manage pinned prefixes, whose KV is not evicted")
    _add_pins(pins, _admin_options(common, is_first=False))
    adapters = add("adapters", "manage LoRA adapters, which clients name as models")
    _add_adapters(adapters, _admin_options(common, is_first=False))


def _admin_options(common: argparse.ArgumentParser, *, is_first: bool) -> argparse.ArgumentParser:
    """The options of every admin command. Without `is_first`, they may follow the action, too."""

    def default(value: object) -> object:
        return value if is_first else argparse.SUPPRESS

    admin = argparse.ArgumentParser(add_help=False, parents=[common])
    if is_first:
        admin.set_defaults(module="admin")
    admin.add_argument(
        "--nats-url", default=default(_nats_url()), help="NATS of a mesh started elsewhere"
    )
    admin.add_argument(
        "--admin-token",
        default=default(os.environ.get("PDMESH_ADMIN_TOKEN", "")),
        help="the admin token (default: $PDMESH_ADMIN_TOKEN)",
    )
    admin.add_argument(
        "--admin-token-file",
        type=Path,
        default=default(None),
        metavar="FILE",
        help="file with the admin token",
    )
    return admin


def _add_ratio(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(module="ratio")
    parser.add_argument(
        "scenario",
        nargs="?",
        default="",
        help="default: show all scenarios, or change the scenario `default`",
    )
    asked = parser.add_mutually_exclusive_group()
    roles = ("prefill", "decode")
    asked.add_argument(
        "--more", choices=roles, help="turn one instance of the other role into this role"
    )
    asked.add_argument("--add", choices=roles, help="give a blank instance this role")
    asked.add_argument("--remove", choices=roles, help="make one instance of this role blank")
    asked.add_argument(
        "--profile",
        type=values.positive,
        nargs=4,
        metavar=("T_P", "B_P", "T_D", "B_D"),
        help="move all groups to the best ratio for requests that take T_P and T_D seconds with "
        "B_P and B_D busy slots",
    )
    parser.add_argument("--group", default="", metavar="GROUP", help="the group to change")
    parser.add_argument(
        "--force",
        action="store_true",
        help="make the move even if the remaining instances become too busy",
    )
    parser.add_argument("--reason", default="", help="a reason, recorded with the change")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_pins(parser: argparse.ArgumentParser, admin: argparse.ArgumentParser) -> None:
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
        default=os.environ.get("PDMESH_API_KEY", ""),
        help="the API key (default: $PDMESH_API_KEY)",
    )
    shown = actions.add_parser("list", parents=[admin], help="show pins and their holders")
    shown.add_argument("--json", action="store_true", help="print JSON")
    remove = actions.add_parser("remove", parents=[admin], help="remove a pin")
    remove.add_argument("pin", help="the pin's name")
    for each in (add, shown, remove):
        each.set_defaults(module="pins")


def _add_adapters(parser: argparse.ArgumentParser, admin: argparse.ArgumentParser) -> None:
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
        "list", parents=[admin], help="show adapters and who has loaded them"
    )
    shown.add_argument("--json", action="store_true", help="print JSON")
    remove = actions.add_parser("remove", parents=[admin], help="take an adapter from clients")
    remove.add_argument("adapter", help="its name")
    for each in (add, shown, remove):
        each.set_defaults(module="adapters")


def _add_status(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--nats-url", default=_nats_url(), help="NATS of a mesh started elsewhere")


def _add_chat(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", help="the question; - reads it from stdin")
    parser.add_argument("--url", help="URL of a gateway (default: the mesh started here)")
    parser.add_argument("--model", default="default", help="a served model (default: the first)")
    parser.add_argument(
        "--max-tokens",
        type=values.positive_int,
        default=256,
        metavar="N",
        help="default: %(default)s",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="sampling temperature (default: 0, which is greedy)",
    )
    parser.add_argument(
        "--api-key",
        default=os.environ.get("PDMESH_API_KEY", ""),
        help="the API key (default: $PDMESH_API_KEY)",
    )


def _add_keys(parser: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    common = argparse.ArgumentParser(add_help=False, parents=[common])
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
    # The limits are those of the tenant, over all its keys.
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
        help="weight of the tenant when calls wait for a slot (default: 1)",
    )
    add.add_argument(
        "--priority", type=values.count, metavar="N", help="0 is served first (default: 1)"
    )
    add.add_argument(
        "--models", nargs="+", metavar="MODEL", help="models that the tenant may use (default: all)"
    )
    actions.add_parser("list", parents=[common], help="list key ids, tenants and limits")
    revoke = actions.add_parser("revoke", parents=[common], help="revoke a key")
    revoke.add_argument("key_id", help="the key's id, as in `pdmesh keys list`")


def _add_artefact(parser: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
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


def _add_events(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "pattern",
        nargs="?",
        default=subjects.ALL,
        help="NATS subject, e.g. mesh.v1.health.*.decode-0",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    parser.add_argument("--nats-url", default=_nats_url(), help="NATS of a mesh started elsewhere")


def _nats_url() -> str | None:
    """The URL from the environment, because other users can read a password on a command line."""
    return os.environ.get("PDMESH_NATS_URL") or None


if __name__ == "__main__":
    main()

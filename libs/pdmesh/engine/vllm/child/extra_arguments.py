"""Reads the setting `engine_args` with vLLM's own parser.

So the names, types and choices of these arguments are vLLM's.
"""

from __future__ import annotations

import argparse
import json
from typing import Any, Final

from pdmesh.core.instance.engine_args import EngineArgs, refusal
from pdmesh.core.suggestion import suggestion
from pdmesh.errors import EngineMisconfigured

_FLAGS: Final = {"true": True, "false": False}
_MAX_PROBLEM_CHARS: Final = 240


def extra_arguments(engine_args: EngineArgs) -> dict[str, Any]:
    """`engine_args` as keyword arguments of `AsyncEngineArgs`. vLLM mixes their types, hence Any.

    Imports vLLM. Raises EngineMisconfigured, which names the first argument that is not usable.
    """
    if not engine_args:
        return {}
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = AsyncEngineArgs.add_cli_args(
        FlexibleArgumentParser(add_help=False, exit_on_error=False)
    )
    return {name: parsed(parser, name, value) for name, value in engine_args.items()}


def parsed(parser: argparse.ArgumentParser, name: str, value: object) -> Any:
    """One argument's value, as the parser reads it from text. Raises EngineMisconfigured."""
    if (reason := refusal(name)) is not None:
        raise unusable(name, reason)
    actions = {action.dest: action for action in parser._actions}
    if name not in actions:
        meant = suggestion(name, [each for each in actions if not refusal(each)])
        raise unusable(name, f"vLLM has no argument of this name{meant}")
    option = f"--{name.replace('_', '-')}"
    try:
        read, rest = parser.parse_known_args(_words(actions[name], option, value))
    except argparse.ArgumentError as error:
        raise unusable(name, _short(error.message)) from None
    except (ValueError, TypeError) as error:
        raise unusable(name, _short(str(error))) from None
    if rest:
        raise unusable(name, f"vLLM does not take {rest[0]!r}")
    return getattr(read, name)


def unusable(name: str, problem: str) -> EngineMisconfigured:
    field = f"engine_args.{name}"
    return EngineMisconfigured(f"{field}: {problem}", reason="BAD_OPTION", field=field)


def _words(action: argparse.Action, option: str, value: object) -> list[str]:
    if action.nargs == 0:
        is_on = value if isinstance(value, bool) else _FLAGS.get(str(value).lower())
        if is_on is None:
            raise ValueError("must be true or false")
        return [option if is_on else f"--no-{option[2:]}"]
    if isinstance(value, list):
        return [option, *map(_text, value)]
    return [f"{option}={_text(value)}"]


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MAX_PROBLEM_CHARS else f"{line[:_MAX_PROBLEM_CHARS]}..."

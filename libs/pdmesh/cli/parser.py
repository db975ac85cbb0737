"""An argument parser that suggests a known word for a misspelled one."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from pdmesh.core.suggestion import suggestion


class CommandParser(argparse.ArgumentParser):
    """Refuses an unknown option, and shows the usage of the subcommand that got the option."""

    def parse_known_args(  # type: ignore[override]  # argparse overloads it by its second argument
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self._refuse(unknown)
        return found, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as exc:
            hint = suggestion(str(value), map(str, action.choices or ()))
            if not hint:
                raise
            raise argparse.ArgumentError(action, f"there is no {value!r}{hint}") from exc

    def _refuse(self, unknown: Sequence[str]) -> NoReturn:
        known = [option for action in self._actions for option in action.option_strings]
        first = unknown[0].partition("=")[0]
        hint = suggestion(first, known) if first.startswith("-") else ""
        self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")

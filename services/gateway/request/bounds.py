"""Checks the values of a request against their bounds, for HTTP and gRPC.

A failed check raises InvalidRequest with the name of the field. NaN is outside every range. A
choice is one answer of a call.
"""

from __future__ import annotations

from typing import Final

from pdmesh.core.sampling.constraint import Constraint
from pdmesh.errors import InvalidRequest

MAX_N: Final = 16
MAX_TOKENS: Final = 1 << 31
MAX_MESSAGES: Final = 2048
MAX_STOPS: Final = 4
MAX_STOP_CHARS: Final = 256
MAX_NAME_CHARS: Final = 256
_LEAST: Final = 2.0**-126  # the least positive normal number of 32 bits
# The next two limit the sum over all choices of a call, because the gateway sends the grammar or
# the list of ids once for each choice.
MAX_GRAMMARS_BYTES: Final = 4 << 20
MAX_ALLOWED_IDS: Final = 1 << 20


def check_sampling(
    *, max_tokens: int | None, temperature: float | None, top_p: float | None
) -> None:
    in_range("max_tokens", max_tokens, 1, MAX_TOKENS)
    in_range("temperature", temperature, 0, 2)
    in_range("top_p", top_p, 0, 1)
    if top_p == 0:
        raise InvalidRequest("top_p must be greater than 0", field="top_p")


def as_sent(value: float) -> float:
    """Return `_LEAST` for a value between 0 and `_LEAST`, which 32 bits could round to 0."""
    return _LEAST if 0 < value < _LEAST else value


def check_choices(*, n: int | None, seed: int | None) -> None:
    """Check `n` and `seed`. Choice i draws with seed + i, so this sum must fit into 64 bits."""
    in_range("n", n, 1, MAX_N)
    in_range("seed", seed, -(1 << 63), (1 << 63) - 1 - MAX_N)


def check_grammars(constraint: Constraint | None, num_choices: int) -> None:
    """Limit the bytes of a call's grammars. `num_choices` counts the choices of all prompts."""
    if constraint is None:
        return
    num_bytes = num_choices * len(constraint.grammar.encode(errors="replace"))
    if num_bytes > MAX_GRAMMARS_BYTES:
        field = constraint.asked_by
        message = (
            f"{field}: {num_choices} choices with a grammar for each make {num_bytes} bytes, at "
            f"most {MAX_GRAMMARS_BYTES} are allowed: ask for fewer choices, or for a smaller form"
        )
        raise InvalidRequest(message, field=field)


def check_allowed_ids(num_ids: int, num_choices: int) -> None:
    """Limit a call's `allowed_token_ids`. `num_choices` counts the choices of all prompts."""
    if num_ids * num_choices > MAX_ALLOWED_IDS:
        field = "allowed_token_ids"
        message = (
            f"{num_choices} choices with {num_ids} {field} for each are too many: at most "
            f"{MAX_ALLOWED_IDS} are allowed in all; ask for fewer choices"
        )
        raise InvalidRequest(message, field=field)


def check_names(**names: str) -> None:
    for field, name in names.items():
        if len(name) > MAX_NAME_CHARS:
            message = f"{field} must have at most {MAX_NAME_CHARS} characters"
            raise InvalidRequest(message, field=field)
    check_text(**names)


def check_text(**texts: str) -> None:
    for field, text in texts.items():
        if "\0" in text:
            raise nul_refused(field)


def nul_refused(field: str) -> InvalidRequest:
    return InvalidRequest(f"{field} contains the character U+0000", field=field)


def stops_of(stop: str | list[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"at most {MAX_STOPS} stop strings are allowed", field="stop")
    if any(not s or len(s) > MAX_STOP_CHARS for s in stops):
        raise InvalidRequest(
            f"a stop string must have 1 to {MAX_STOP_CHARS} characters", field="stop"
        )
    return stops


def context_exceeded(prompt: str, max_tokens: int, field: str) -> InvalidRequest:
    message = f"the prompt has {prompt}, but the model's context is {max_tokens} tokens"
    return InvalidRequest(message, reason="CONTEXT_LENGTH_EXCEEDED", field=field)


def in_range(field: str, value: float | None, low: int, high: int) -> None:
    if value is not None and not low <= value <= high:
        raise InvalidRequest(f"{field} must be between {low} and {high}", field=field)

"""`pdmesh chat`: asks one question, and shows the answer as it arrives.

It uses only http.client, because importing a larger library would delay the first token.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from pdmesh.cli.errors import CommandFailed, no_mesh
from pdmesh.cli.texts import text_of
from pdmesh.launcher import state

_TIMEOUT_S: Final = 300
_MAX_ERROR_BYTES: Final = 65_536


def run(options: argparse.Namespace) -> int:
    url = options.url or url_of_mesh(options)
    prompt = text_of(Path("-")) if options.prompt == "-" else options.prompt
    for piece in ask(
        url,
        prompt,
        options.model,
        options.max_tokens,
        options.temperature,
        options.api_key,
    ):
        sys.stdout.write(piece)
        sys.stdout.flush()
    print()
    return 0


def ask(
    url: str, prompt: str, model: str, max_tokens: int, temperature: float, api_key: str = ""
) -> Iterator[str]:
    """Yield the answer's text in pieces. Raises CommandFailed with the gateway's own message."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": temperature,
        "stream": True,
    }
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    with answers_from(url), closing(connection_to(url)) as connection:
        path = f"{base_path(url)}/v1/chat/completions"
        connection.request("POST", path, json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise CommandFailed(error_text(response.status, response.read(_MAX_ERROR_BYTES)))
        yield from _pieces(response)


@contextmanager
def answers_from(url: str) -> Iterator[None]:
    """Turn errors of the connection, and answers that are not HTTP, into CommandFailed."""
    try:
        yield
    except (OSError, http.client.HTTPException, ValueError) as exc:
        reason = getattr(exc, "strerror", None) or _plain(exc) or type(exc).__name__
        raise CommandFailed(
            f"no answer from {url}: {reason}; is the mesh up? (pdmesh status)"
        ) from exc


def _plain(exc: Exception) -> str:
    """The error's text without control characters, which would change the terminal's state.

    A server of another protocol may send such characters.
    """
    if isinstance(exc, http.client.BadStatusLine) and not isinstance(exc, ConnectionError):
        return "it does not speak HTTP"
    return "".join(c for c in str(exc) if c.isprintable())


def connection_to(url: str) -> http.client.HTTPConnection:
    """Make an HTTP connection to a gateway, without opening it. Raises CommandFailed."""
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.netloc:
        raise CommandFailed(f"{url} is not a gateway's address, such as http://127.0.0.1:8000")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(parts.netloc, timeout=_TIMEOUT_S)


def base_path(url: str) -> str:
    """The path of a gateway's URL, without the final /v1 of an OpenAI client's base URL."""
    return urlsplit(url).path.rstrip("/").removesuffix("/v1")


def _pieces(response: http.client.HTTPResponse) -> Iterator[str]:
    is_done = False
    for line in response:
        if not line.startswith(b"data:"):
            continue
        data = line[len(b"data:") :].strip()
        if data == b"[DONE]":
            is_done = True
            break
        event: dict[str, Any] = json.loads(data)
        if "error" in event:
            raise CommandFailed(f"the answer broke off: {event['error'].get('message')}")
        for choice in event.get("choices", ()):
            yield choice.get("delta", {}).get("content") or ""
    if not is_done:
        raise CommandFailed("the answer broke off: the gateway closed the connection")


def error_text(status: int, body: bytes) -> str:
    """The gateway's own error message, or the status if the body has none."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the gateway answered {status}"


def url_of_mesh(options: argparse.Namespace) -> str:
    """The URL of a gateway of the mesh started here. Raises CommandFailed."""
    mesh = state.read(options.state_dir)
    if mesh is None:
        raise no_mesh(options.state_dir)
    if mesh.phase != "ready":
        raise CommandFailed(f"the mesh is {mesh.phase}; try again when it is ready")
    return mesh.http_url

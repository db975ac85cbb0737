"""Tests how keys are fetched from an OpenID provider, and which answers are refused."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from pdmesh.net.oidc.provider import KeySource, ProviderFailed

DISCOVERY = "/.well-known/openid-configuration"
KEYS = {"keys": [{"kty": "RSA"}]}


@contextlib.contextmanager
def serving(pages: Mapping[str, Any]) -> Iterator[str]:
    """Serve these pages by path. A page is JSON, bytes, or a status with a location. Yields the
    address.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = pages.get(self.path, (404, ""))
            is_page = not isinstance(page, tuple)
            self.send_response(200 if is_page else page[0])
            if not is_page:
                self.send_header("location", page[1])
            body = page if isinstance(page, bytes) else json.dumps(page).encode()
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_the_keys_are_where_the_provider_or_the_setting_says() -> None:
    pages: dict[str, Any] = {"/jwks": KEYS, "/other": {"keys": []}}
    with serving(pages) as url:
        pages[f"/realm{DISCOVERY}"] = {"issuer": f"{url}/realm", "jwks_uri": f"{url}/jwks"}
        assert KeySource(f"{url}/realm").fetch() == KEYS
        assert KeySource(f"{url}/realm", f"{url}/other").fetch() == {"keys": []}


@pytest.mark.parametrize(
    ("document", "says"),
    [
        (
            {"issuer": "https://evil.example.org", "jwks_uri": "URL/jwks"},
            "its issuer is https://evil",
        ),
        ({"issuer": "URL"}, "it has no jwks_uri"),
        ({"issuer": "URL", "jwks_uri": 7}, "it has no jwks_uri"),
        ({"issuer": "URL", "jwks_uri": "file:///etc/passwd"}, "not an address of HTTP"),
        ([], "its issuer is None"),
        ({"issuer": "URL", "jwks_uri": "URL/moved"}, "answered 302"),
        ({"issuer": "URL", "jwks_uri": "URL/nowhere"}, "answered 404"),
        ({"issuer": "URL", "jwks_uri": "URL/long"}, "more than 1048576 bytes"),
        ({"issuer": "URL", "jwks_uri": "URL/text"}, "not the expected JSON"),
        ({"issuer": "URL", "jwks_uri": "http://127.0.0.1:1/"}, "Connection refused"),
    ],
)
def test_answers_that_are_not_keys_of_this_provider_are_refused_with_the_address(
    document: Any, says: str
) -> None:
    pages: dict[str, Any] = {
        "/jwks": KEYS, "/moved": (302, "/jwks"), "/long": b"x" * (2 << 20), "/text": b"<html>",
    }  # fmt: skip
    with serving(pages) as url:
        pages[DISCOVERY] = json.loads(json.dumps(document).replace("URL", url))
        with pytest.raises(ProviderFailed) as failed:
            KeySource(url).fetch()
    assert says in str(failed.value)
    assert str(failed.value).startswith(("http://127.0.0.1:", "file:"))

"""Fetches the keys of an OpenID provider (OpenID Connect Discovery 1.0, section 4; RFC 7517)."""

from __future__ import annotations

import http.client
import json
import ssl
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from pdmesh.core.access.exposure import is_loopback
from pdmesh.errors import shortened

_DISCOVERY: Final = "/.well-known/openid-configuration"
_TIMEOUT_S: Final = 5.0  # the longest wait for a single read
_WHOLE_S: Final = 10.0  # the longest time for a whole document
_MAX_BYTES: Final = 1 << 20
_CHUNK_BYTES: Final = 65_536


class ProviderFailed(Exception):
    """A fetch failed. The message is one line with the address and the reason."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects, because they could lead to an address that has not been checked."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


@dataclass(frozen=True, slots=True)
class KeySource:
    """The address of a provider's keys.

    If `jwks_url` is empty, the address is in the provider's discovery document. If `ca_file` is
    None, the system's authorities are used.
    """

    issuer: str
    jwks_url: str = ""
    ca_file: Path | None = None

    def fetch(self) -> Any:
        """Fetch the provider's JWK set, as parsed JSON. Blocks. Raises ProviderFailed."""
        return self._get(self.jwks_url or self._discovered())

    def _discovered(self) -> str:
        url = self.issuer.rstrip("/") + _DISCOVERY
        found = self._get(url)
        issuer = found.get("issuer") if isinstance(found, dict) else None
        if issuer != self.issuer:
            said = shortened(str(issuer))
            raise ProviderFailed(f"{url}: its issuer is {said}, not {self.issuer}")
        jwks_url = found.get("jwks_uri")
        if not isinstance(jwks_url, str):
            raise ProviderFailed(f"{url}: it has no jwks_uri")
        if urlsplit(self.issuer).scheme == "https" and urlsplit(jwks_url).scheme != "https":
            raise ProviderFailed(f"{url}: its jwks_uri does not begin with https://")
        return jwks_url

    def _get(self, url: str) -> Any:
        request = urllib.request.Request(url, headers={"Accept": "application/json"})  # noqa: S310 - checked
        try:
            with self._opener(url).open(request, timeout=_TIMEOUT_S) as answer:
                return json.loads(_read(answer))
        except urllib.error.HTTPError as exc:
            exc.close()
            raise ProviderFailed(f"{url}: answered {exc.code}") from exc
        except urllib.error.URLError as exc:
            raise ProviderFailed(f"{url}: {exc.reason}") from exc
        except (OSError, http.client.HTTPException) as exc:
            raise ProviderFailed(f"{url}: {exc}") from exc
        except ValueError as exc:  # also from JSON's parser
            raise ProviderFailed(f"{url}: not the expected JSON: {exc}") from exc

    def _opener(self, url: str) -> urllib.request.OpenerDirector:
        """An opener that uses the environment's proxies, except for addresses of this machine.

        Raises ValueError.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("https", "http"):
            raise ValueError("not an address of HTTP")
        context = ssl.create_default_context(cafile=self.ca_file)
        handlers: list[urllib.request.BaseHandler] = [
            _NoRedirect(),
            urllib.request.HTTPSHandler(context=context),
        ]
        if is_loopback(parts.hostname or ""):
            handlers.append(urllib.request.ProxyHandler({}))
        return urllib.request.build_opener(*handlers)


def _read(answer: http.client.HTTPResponse) -> bytes:
    """The body of the answer. Raises ValueError if it is too long, OSError after _WHOLE_S."""
    until, found = time.monotonic() + _WHOLE_S, bytearray()
    while chunk := answer.read1(_CHUNK_BYTES):
        found += chunk
        if len(found) > _MAX_BYTES:
            raise ValueError(f"more than {_MAX_BYTES} bytes")
        if time.monotonic() > until:
            raise TimeoutError("the answer takes too long")
    return bytes(found)

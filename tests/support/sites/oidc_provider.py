"""A real OpenID provider in its own process, and clients that log in there as a browser does.

The provider is oidc-provider-mock, which is based on Authlib.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import httpx

from pdmesh.embedded.ports import PortReservation
from tests.support.waiting import wait_until

AUDIENCE: Final = "pdmesh"
_CLOCK: Final = Path(__file__).parents[2] / "fakes" / "skewed_clock"
_BACK: Final = "http://127.0.0.1/back"
_START_S: Final = 60.0


class OidcProvider:
    """Runs the provider. Each start makes a new key, and the port stays the same.

    `max_age_s` is the lifetime of a token. `users` has the claims of each user, by subject.
    """

    def __init__(self, folder: Path, max_age_s: int = 3600, **users: dict[str, Any]) -> None:
        self._folder, self._max_age_s, self._users = folder, max_age_s, users
        self._skew = folder / "provider-skew"
        self._reserved = PortReservation("127.0.0.1", 0)
        self.port = self._reserved.port
        self.issuer = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, skew_s: int = 0, *, names_key: bool = True) -> None:
        """Start the provider, and wait until it answers. Its clock is `skew_s` ahead.

        With `names_key`, tokens name the key that signed them.
        """
        self._skew.write_text(str(skew_s))
        path = os.pathsep.join([str(_CLOCK), *filter(None, sys.path)])
        users = [
            part
            for sub, claims in self._users.items()
            for part in ("--user-claims", json.dumps({"sub": sub, **claims}))
        ]
        command = [
            sys.executable, "-m", "tests.fakes.oidc.server", "--port", str(self.port),
            "--token-max-age", str(self._max_age_s), *users,
        ]  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": path, "SKEW_FILE": str(self._skew)}
        environment["OIDC_NAMELESS"] = "" if names_key else "1"
        with (self._folder / "provider.log").open("ab") as log:
            self._process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        wait_until(self._answers, _START_S)

    def _answers(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.issuer}/jwks").status_code == 200
        return False

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def close(self) -> None:
        self.stop()
        self._reserved.close()

    def freeze(self) -> None:
        """Stop the process with SIGSTOP. It then accepts connections but answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def token(self, user: str, audience: str = AUDIENCE) -> str:
        """Log in as this user to the client `audience`, and return the ID token."""
        with httpx.Client(base_url=self.issuer, follow_redirects=False) as client:
            asked = {
                "response_type": "code", "client_id": audience, "redirect_uri": _BACK,
                "scope": "openid email", "state": "s",
            }  # fmt: skip
            granted = client.post("/oauth2/authorize", params=asked, data={"sub": user})
            (code,) = parse_qs(urlsplit(granted.headers["location"]).query)["code"]
            form = {"grant_type": "authorization_code", "code": code, "redirect_uri": _BACK}
            given = client.post("/oauth2/token", data=form, auth=(audience, "secret"))
            return str(given.json()["id_token"])

    def key(self) -> dict[str, Any]:
        """The public key that the provider publishes now."""
        (found,) = httpx.get(f"{self.issuer}/jwks").json()["keys"]
        assert isinstance(found, dict)
        return found


@contextlib.contextmanager
def oidc_provider(
    folder: Path, max_age_s: int = 3600, skew_s: int = 0, **users: dict[str, Any]
) -> Iterator[OidcProvider]:
    provider = OidcProvider(folder, max_age_s, **users)
    provider.start(skew_s)
    try:
        yield provider
    finally:
        provider.close()

"""Runs oidc-provider-mock, a real OpenID provider: `python -m tests.fakes.oidc.server`.

Its tokens name the key that signed them, as the tokens of most providers do. With OIDC_NAMELESS,
tokens name no key, which is the default of oidc-provider-mock.
"""

from __future__ import annotations

import os
from typing import Any

from oidc_provider_mock import _app as provider  # type: ignore[import-untyped]
from oidc_provider_mock.__main__ import run  # type: ignore[import-untyped]

_config = provider.OpenIDCode.get_jwt_config


def _with_key_id(self: Any, grant: Any, client: Any = None) -> dict[str, Any]:
    return {**_config(self, grant, client), "kid": provider.storage.jwk.thumbprint()}


if not os.environ.get("OIDC_NAMELESS"):
    provider.OpenIDCode.get_jwt_config = _with_key_id
run()

"""Checks bearer tokens against the keys of their OpenID provider (RFC 7519, RFC 8725).

Keys are fetched in a background thread. A request waits for a fetch only if there are no keys yet,
or if its token may have been signed with a new key. It waits for at most two seconds. While the
provider is unreachable, the last keys stay valid.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import jwt
import structlog

from pdmesh.core.access.claims import Claims
from pdmesh.core.access.key_refresh import KeyRefresh
from pdmesh.errors import InvalidToken, MeshError, Unavailable, shortened
from pdmesh.net.oidc.keys import KeySet, NoKeys, SigningKey
from pdmesh.net.oidc.provider import ProviderFailed
from pdmesh.telemetry import metrics, names

log = structlog.get_logger(__name__)

_MAX_TOKEN_CHARS: Final = 8192
_MAX_KNOWN: Final = 4096  # remembered tokens, whose signatures are not checked again
_WAIT_S: Final = 2.0  # the longest wait of a token for a fetch of its key
_RETRY_MS: Final = 1000
_WRONG_SIGNATURE: Final = "WRONG_SIGNATURE"

_fetches = metrics.counter(
    names.OIDC_FETCHES, "Fetches of an OpenID provider's keys, by outcome: ok, failed"
)


@dataclass(frozen=True, slots=True)
class TokenRules:
    """The properties that a valid token must have."""

    issuer: str
    audience: str
    algorithms: tuple[str, ...]
    leeway_s: float  # how far the provider's clock may be off


class TokenVerifier:
    """Checks tokens. Keys are fetched only while `run` runs.

    `fetch` returns the provider's JWK set or raises ProviderFailed. It is called in a thread.
    """

    def __init__(
        self,
        rules: TokenRules,
        fetch: Callable[[], Any],
        refresh: KeyRefresh,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rules, self._fetch, self._refresh, self._now = rules, fetch, refresh, now
        self._keys: KeySet | None = None
        self._known: OrderedDict[bytes, Claims] = OrderedDict()
        self._wake, self._fetched = asyncio.Event(), asyncio.Event()
        metrics.gauge(
            names.OIDC_KEYS_AGE,
            "Time since an OpenID provider's keys were fetched; -1: never",
            self._age_s,
            "s",
        )

    async def claims(self, token: str) -> Claims:
        """The claims of a valid token. Raises InvalidToken, or Unavailable if there are no keys."""
        found = self._checked(token)
        if isinstance(found, MeshError) and self._refresh.wants(self._now()):
            self._wake.set()
            fetched = self._fetched
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(fetched.wait(), _WAIT_S)
            found = self._checked(token)
        if isinstance(found, MeshError):
            raise found
        return found

    async def run(self) -> None:
        """Fetch the keys when they are due. Runs until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._refresh.wait_s(self._now())):
                    await self._wake.wait()
            self._wake.clear()
            if self._refresh.wait_s(self._now()) > 0:
                continue
            self._refresh.begin(self._now())
            is_good = await self._renew()
            self._refresh.end(self._now(), is_good=is_good)
            fetched, self._fetched = self._fetched, asyncio.Event()
            fetched.set()

    async def _renew(self) -> bool:
        """Fetch the keys. Returns whether the fetch succeeded."""
        try:
            keys = KeySet(await asyncio.to_thread(self._fetch))
        except (ProviderFailed, NoKeys) as exc:
            has_keys = self._keys is not None
            log.warning("oidc.keys_not_fetched", reason=str(exc), last_keys_stay=has_keys)
            _fetches.add(1, {names.ATTR_OUTCOME: "failed"})
            return False
        if self._keys is None or self._keys.names != keys.names:
            log.info("oidc.keys_fetched", key_ids=sorted(keys.names))
        self._keys = keys
        self._known.clear()  # a key may have been withdrawn
        _fetches.add(1, {names.ATTR_OUTCOME: "ok"})
        return True

    def _age_s(self) -> float:
        age_s = self._refresh.age_s(self._now())
        return -1.0 if math.isinf(age_s) else age_s

    # --- one token -------------------------------------------------------------------------------

    def _checked(self, token: str) -> Claims | MeshError:
        """The claims of a token, or an error that may disappear with newer keys.

        Raises InvalidToken if no newer keys can make the token valid.
        """
        digest = hashlib.sha256(token.encode(errors="replace")).digest()
        if (known := self._known.get(digest)) is not None:
            if time.time() < int(known["exp"]) + self._rules.leeway_s:
                self._known.move_to_end(digest)
                return known
            del self._known[digest]
        key_id = _key_id(token, self._rules.algorithms)
        if self._keys is None:
            return Unavailable(
                "the identity provider's keys are not known yet, so no token can be checked",
                retry_after_ms=_RETRY_MS,
            )
        key = self._keys.find(key_id)
        if key is None:
            text = (
                "the token names no key (kid), and the identity provider has several"
                if key_id is None
                else f"the token names the key {shortened(key_id)}, "
                "which the identity provider does not have"
            )
            return InvalidToken(text, reason="UNKNOWN_KEY")
        try:
            claims = self._decoded(token, key)
        except InvalidToken as exc:
            if key_id is None and exc.reason == _WRONG_SIGNATURE:
                return exc  # a new key, which is not fetched yet, may have signed the token
            raise
        self._known[digest] = claims
        while len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)
        return claims

    def _decoded(self, token: str, key: SigningKey) -> Claims:
        rules = self._rules
        try:
            return jwt.decode(
                token,
                key.public_key,
                algorithms=[name for name in key.algorithms if name in rules.algorithms],
                audience=rules.audience,
                issuer=rules.issuer,
                leeway=rules.leeway_s,
                options={"require": ["exp", "iss", "aud"]},
            )
        except jwt.PyJWTError as exc:
            raise _refusal(exc, rules) from None  # the text of `exc` may quote the token


def _key_id(token: str, algorithms: tuple[str, ...]) -> str | None:
    """The id (kid) of the key that a token names, or None. Raises InvalidToken."""
    if len(token) > _MAX_TOKEN_CHARS:
        raise InvalidToken(f"a token has at most {_MAX_TOKEN_CHARS} characters")
    try:
        header = jwt.get_unverified_header(token)
    except jwt.PyJWTError:
        raise InvalidToken("this is neither an API key nor a signed token (JWT)") from None
    if header.get("alg") not in algorithms:
        algorithm = shortened(str(header.get("alg")))
        raise InvalidToken(
            f"tokens with the algorithm {algorithm} are not accepted", reason="WRONG_ALGORITHM"
        )
    key_id: str | None = header.get("kid")
    return key_id


def _refusal(exc: jwt.PyJWTError, rules: TokenRules) -> InvalidToken:
    match exc:
        case jwt.ExpiredSignatureError():
            return InvalidToken("the token has expired (exp)", reason="TOKEN_EXPIRED")
        case jwt.ImmatureSignatureError():
            return InvalidToken("the token is not valid yet (nbf, iat)", reason="TOKEN_NOT_YET")
        case jwt.MissingRequiredClaimError(claim=claim):
            return InvalidToken(f"the token has no claim {claim}", reason="CLAIM_MISSING")
        case jwt.InvalidAudienceError():
            text = f"the token is for others: its aud does not contain {rules.audience}"
            return InvalidToken(text, reason="WRONG_AUDIENCE")
        case jwt.InvalidIssuerError():
            text = f"the token is from another provider: its iss is not {rules.issuer}"
            return InvalidToken(text, reason="WRONG_ISSUER")
        case jwt.InvalidAlgorithmError():
            text = "the provider's key does not allow the token's algorithm"
            return InvalidToken(text, reason="WRONG_ALGORITHM")
        case jwt.InvalidSignatureError():
            text = "the token's signature does not match the provider's key"
            return InvalidToken(text, reason=_WRONG_SIGNATURE)
    return InvalidToken("the token is not a valid JWT (RFC 7519)")

"""Selects the keys of a JWK set that may verify tokens: asymmetric keys that are strong enough."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import jwt
import structlog
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

log = structlog.get_logger(__name__)

_OF_KINDS: Final[Mapping[tuple[str, str], tuple[str, ...]]] = MappingProxyType(
    {
        ("RSA", ""): ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
        ("EC", "P-256"): ("ES256",),
        ("EC", "P-384"): ("ES384",),
        ("EC", "P-521"): ("ES512",),
        ("OKP", "Ed25519"): ("EdDSA",),
    }
)
ALGORITHMS: Final = tuple(name for names in _OF_KINDS.values() for name in names)
_MIN_RSA_BITS: Final = 2048
_MAX_RSA_BITS: Final = 8192  # a longer key would cost milliseconds per token
_MAX_KEYS: Final = 100


class NoKeys(Exception):
    """The JWK set has no usable key. The message is one line with the reason."""


@dataclass(frozen=True, slots=True)
class SigningKey:
    key_id: str
    public_key: Any  # a class of the library cryptography, which depends on the kind of key
    algorithms: tuple[str, ...]  # with which the key may sign tokens


class KeySet:
    """The usable keys of a JWK set."""

    def __init__(self, found: Any) -> None:
        """`found` is the parsed JSON of the set. Raises NoKeys."""
        listed = found.get("keys") if isinstance(found, dict) else None
        if not isinstance(listed, list):
            raise NoKeys("it is not a JWK set")
        keys = [key for each in listed[:_MAX_KEYS] if (key := _signing_key(each)) is not None]
        if not keys:
            raise NoKeys(f"none of its {len(listed)} keys can sign tokens")
        self._keys = {key.key_id: key for key in reversed(keys)}

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._keys)

    def find(self, key_id: str | None) -> SigningKey | None:
        """The key with this id, or None if it is not in the set.

        `key_id` is None for a token that names no key. The result is then the only key of the set,
        or None if the set has several keys.
        """
        if key_id is None:
            return next(iter(self._keys.values())) if len(self._keys) == 1 else None
        return self._keys.get(key_id)


def _signing_key(found: Any) -> SigningKey | None:
    if not isinstance(found, dict) or found.get("use", "sig") != "sig":
        return None
    curve = str(found.get("crv", "")) if found.get("kty") != "RSA" else ""
    algorithms = _OF_KINDS.get((str(found.get("kty")), curve), ())
    if (named := found.get("alg")) is not None:
        algorithms = tuple(name for name in algorithms if name == named)
    if not algorithms:
        return None
    public = {name: value for name, value in found.items() if name != "d"}
    try:
        key = jwt.PyJWK(public, algorithms[0]).key
    except (jwt.PyJWTError, ValueError, TypeError) as exc:
        log.warning("oidc.bad_key", key_id=found.get("kid"), error=str(exc))
        return None
    if isinstance(key, RSAPublicKey) and not _MIN_RSA_BITS <= key.key_size <= _MAX_RSA_BITS:
        log.warning("oidc.bad_key", key_id=found.get("kid"), error=f"{key.key_size} bits")
        return None
    return SigningKey(str(found.get("kid", "")), key, algorithms)

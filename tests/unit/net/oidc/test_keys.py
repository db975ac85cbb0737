"""Tests which keys of a JWK set can sign tokens."""

from __future__ import annotations

from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt import algorithms

from pdmesh.net.oidc.keys import ALGORITHMS, KeySet, NoKeys


def rsa_key(bits: int = 2048, **more: Any) -> dict[str, Any]:
    key = rsa.generate_private_key(65537, bits).public_key()
    return {**algorithms.RSAAlgorithm.to_jwk(key, as_dict=True), **more}


def elliptic(curve: ec.EllipticCurve, **more: Any) -> dict[str, Any]:
    key = ec.generate_private_key(curve).public_key()
    return {**algorithms.ECAlgorithm.to_jwk(key, as_dict=True), **more}


def edwards(**more: Any) -> dict[str, Any]:
    key = ed25519.Ed25519PrivateKey.generate().public_key()
    return {**algorithms.OKPAlgorithm.to_jwk(key, as_dict=True), **more}


def test_a_key_fixes_the_algorithms_of_its_tokens() -> None:
    keys = KeySet(
        {
            "keys": [
                rsa_key(kid="r"), rsa_key(kid="p", alg="PS256"), elliptic(ec.SECP256R1(), kid="e"),
                elliptic(ec.SECP384R1(), kid="f"), edwards(kid="d"),
            ]
        }
    )  # fmt: skip
    found = {name: getattr(keys.find(name), "algorithms", None) for name in "rpefdx"}
    assert found == {
        "r": ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"), "p": ("PS256",),
        "e": ("ES256",), "f": ("ES384",), "d": ("EdDSA",), "x": None,
    }  # fmt: skip
    assert keys.find(None) is None, "a token that names no key is of the only key"
    assert not any(name.startswith("HS") or name == "none" for name in ALGORITHMS)


@pytest.mark.parametrize(
    "key",
    [
        {"kty": "oct", "k": "c2VjcmV0", "alg": "HS256"}, rsa_key(1024), rsa_key(use="enc"),
        rsa_key(alg="HS256"), rsa_key(alg="ES256"), rsa_key(alg="none"),
        {"kty": "RSA", "n": "!", "e": "AQAB"}, {"kty": "RSA"},
        elliptic(ec.SECP256R1(), x="AA"), {}, "x", None, {"kty": ["RSA"]}, 7,
    ],
)  # fmt: skip
def test_keys_that_cannot_sign_tokens_are_left_out(key: Any) -> None:
    with pytest.raises(NoKeys):
        KeySet({"keys": [key]})
    keys = KeySet({"keys": [key, rsa_key(kid="good")]})
    assert keys.names == {"good"}


@pytest.mark.parametrize("found", [None, [], {}, {"keys": None}, {"keys": {}}, {"keys": []}, "x"])
def test_what_is_no_set_of_keys_is_refused(found: Any) -> None:
    with pytest.raises(NoKeys):
        KeySet(found)


def test_the_only_key_is_that_of_tokens_that_name_none() -> None:
    keys = KeySet({"keys": [rsa_key()]})
    assert keys.find(None) is not None
    assert keys.find("other") is None

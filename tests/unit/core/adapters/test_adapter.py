"""The names, paths and digests that an adapter may have."""

from __future__ import annotations

import pytest

from pdmesh.core.adapters.adapter import Adapter, check_name, check_path
from pdmesh.errors import InvalidRequest

DIGEST = "0123456789abcdef" * 4


@pytest.mark.parametrize("name", ["sql", "SQL-v2", "a_b", "7", "x" * 63])
def test_a_name_has_letters_digits_and_dashes(name: str) -> None:
    check_name(name)
    Adapter(name, DIGEST, "/adapters/sql").check()


@pytest.mark.parametrize("name", ["", "-a", "a b", "a.b", "a/b", "a*", "ä", "x" * 64, "a\n"])
def test_any_other_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_name(name)
    assert refused.value.field == "name"


@pytest.mark.parametrize("path", ["", "adapters/sql", "/a\0b", "/" + "a" * 4096])
def test_a_path_is_absolute_and_bounded(path: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_path(path)
    assert refused.value.field == "path"


@pytest.mark.parametrize("digest", ["", DIGEST[1:], DIGEST.upper(), "g" * 64])
def test_a_digest_that_is_not_of_sha_256_is_refused(digest: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        Adapter("sql", digest, "/a").check()
    assert refused.value.field == "adapter.digest"

"""The targets of `make fuzz` keep every promise for their seeds and for inputs close to a seed.

test_wire_fuzz.py tests the target for the KV wire.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz import grpc_messages, targets
from tests.fuzz.budget import Budget

pytestmark = [
    pytest.mark.fault("F30", "F31", "F32"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
NAMES = [name for name in targets.MODULES if name != "kv_wire"]


@pytest.fixture(scope="module", autouse=True)
def _ended() -> Iterator[None]:
    yield
    grpc_messages.close()


@pytest.mark.parametrize("name", NAMES)
def test_the_seed_corpus_is_up_to_date_and_has_no_findings(name: str) -> None:
    module = import_module(targets.MODULES[name])
    seeds = {path.name: path.read_bytes() for path in (targets.CORPUS / name).iterdir()}
    assert seeds == module.seeds(), f"python -m tests.fuzz.targets {name}"
    for data in (*seeds.values(), module.honest(), b""):
        module.feed(data)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_an_input_close_to_a_seed_breaks_no_promise(name: str, data: st.DataObject) -> None:
    module = import_module(targets.MODULES[name])
    raw = bytearray(data.draw(st.sampled_from(sorted(module.seeds().values()))))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
        raw = raw or bytearray(b"\0")
    module.feed(bytes(raw))


def test_the_budget_allows_an_honest_input_but_not_a_thousand_times_as_much() -> None:
    def work(data: bytes) -> None:
        for _ in range(1000 * len(data)):
            pass

    budget = Budget(work, b"x" * 100, most=50)
    budget(b"x" * 100)
    with pytest.raises(AssertionError, match="are allowed"):
        budget(b"x" * 100_000)

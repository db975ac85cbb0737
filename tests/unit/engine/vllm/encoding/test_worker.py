"""The outcome of the fetches of one prompt's embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import pytest

from pdmesh.core.kv.transfer.ticket import PullFailure
from pdmesh.engine.vllm.encoding.worker import first_fetched
from pdmesh.errors import KvTransferFailed

pytestmark = pytest.mark.req("S129", "S130")


def over(outcome: int | str | None) -> Future[Sequence[bytes]]:
    """A fetch that brought this number of images, failed for this reason, or was cancelled
    (None).
    """
    future: Future[Sequence[bytes]] = Future()
    if outcome is None:
        future.cancel()
    elif isinstance(outcome, str):
        future.set_exception(KvTransferFailed("no", reason=outcome))
    else:
        future.set_result([b"name"] * outcome)
    return future


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ([2], (2, "")),
        ([2, 3], (5, "")),
        ([1, 3], (1, "")),  # the encoder has evicted the second image of the first fetch
        ([0, 3], (0, "")),
        ([2, 1], (3, "")),
        ([2, PullFailure.TIMEOUT], (0, PullFailure.TIMEOUT)),
        ([PullFailure.PEER_LOST, 3], (0, PullFailure.PEER_LOST)),
        ([2, None], (0, PullFailure.CLOSING)),
    ],
)
def test_the_first_images_count_if_no_fetch_failed(
    outcomes: list[int | str | None], expected: tuple[int, str]
) -> None:
    fetches = [over(outcome) for outcome in outcomes]
    assert first_fetched(fetches, [2, 3][: len(fetches)]) == expected

"""The addresses from which a gateway may fetch images, and images that a request contains."""

from __future__ import annotations

import base64
import random
import sys
import time
from collections.abc import Callable
from types import FrameType

import pytest

from pdmesh.core.images.image_bounds import ImageRefused, ImageRules
from pdmesh.core.images.source import ImageAddress, address_of, data_of, decoded, is_public
from tests.support.images.files import data_uri, png

HOSTS = {"example.org", "example.org:8443"}


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://example.org/a.png", ImageAddress("https", "example.org", 443, "/a.png")),
        ("http://EXAMPLE.org", ImageAddress("http", "example.org", 80, "/")),
        ("https://example.org:8443/a?b=c#d", ImageAddress("https", "example.org", 8443, "/a?b=c")),
    ],
)
def test_an_allowed_address_is_parsed_once(url: str, expected: ImageAddress) -> None:
    assert address_of(url, HOSTS) == expected


@pytest.mark.parametrize(
    "url",
    [
        "https://other.org/a", "https://example.org:9/a", "http://example.org:443/a",
        "https://example.org.evil.net/", "https://evil.net/?https://example.org/",
        "https://example.org@evil.net/", "https://evil.net\\@example.org/",
        "https://example.org\\.evil.net/", "https://user:pw@example.org/", "ftp://example.org/",
        "file:///etc/passwd", "//example.org/", "example.org/a", "https://", "https://[::1]/",
        "https://example.org:99999/", "https://example.org:x/", "https://example.org/a b",
        "https://example.org/\r\nHost: x", "https://ex\u00e4mple.org/", "https://127.0.0.1/",
        "https://exam\tple.org/", "https://example.org/a\nb", "https://example.org/a\r",
        "\x00https://example.org/", " https://example.org/", "https://example.org/\x00",
        "https://example.org/\x7f", "https://example.org/" + "a" * 3000, "gopher://example.org/",
        "https://example.org%00.net/",
    ],
)  # fmt: skip
def test_any_other_address_is_refused(url: str) -> None:
    with pytest.raises(ImageRefused) as refused:
        address_of(url, HOSTS)
    assert len(str(refused.value)) < 200


def test_no_host_is_allowed_unless_it_is_named() -> None:
    with pytest.raises(ImageRefused, match="operator"):
        address_of("https://example.org/", ImageRules().hosts)


@pytest.mark.parametrize("ip", ["93.184.216.34", "2606:2800:220:1::1", "64:ff9b::5db8:d822"])
def test_public_addresses_may_be_reached(ip: str) -> None:
    assert is_public(ip)


@pytest.mark.parametrize(
    "ip",
    [
        "127.0.0.1", "127.9.9.9", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254",
        "100.64.0.1", "0.0.0.0", "255.255.255.255", "224.0.0.1", "192.0.2.1", "::1", "::",
        "fe80::1", "fc00::1", "fd00:ec2::254", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1",
        "2002:7f00:1::", "64:ff9b::7f00:1", "64:ff9b:1::7f00:1", "fe80::1%eth0", "x", "",
        "0177.0.0.1", "2130706433", "168.63.129.16", "::ffff:168.63.129.16", "64:ff9b::a83f:8110",
        "::127.0.0.1", "::93.184.216.34", "fec0::1", "5f00::1", "4000::1", "100:0:0:1::1",
        "64:ff9b:1:7f00:0:100:5db8:d822", "64:ff9b:1::5db8:d822",
    ],
)  # fmt: skip
def test_no_other_address_may_be_reached(ip: str) -> None:
    assert not is_public(ip)


def test_a_data_uri_holds_base64() -> None:
    data = png(3)
    assert data_of(data_uri(data), ImageRules()) == data
    assert data_of(data_uri(data, ""), ImageRules()) == data
    assert data_of(data_uri(data).replace("data:", "DATA:"), ImageRules()) == data


@pytest.mark.parametrize(
    "url",
    ["data:", "data:image/png,x", "data:image/png;base64", "data:image/png;charset=x;base64,AA==",
     "data:image/png;base64,A", "data:image/png;base64,A A=", "data:image/png;base64,\u00e4AA="],
)  # fmt: skip
def test_another_data_uri_is_refused(url: str) -> None:
    with pytest.raises(ImageRefused):
        data_of(url, ImageRules())


def test_too_many_bytes_are_refused_before_they_are_decoded() -> None:
    rules = ImageRules(max_bytes=30)
    assert decoded(base64.b64encode(bytes(30)).decode(), rules) == bytes(30)
    for text in (base64.b64encode(bytes(34)).decode(), "not base64 " * 100):
        with pytest.raises(ImageRefused, match="30 bytes"):
            decoded(text, rules)


@pytest.mark.parametrize("num_bytes", [0, 1, 49_151, 49_152, 49_153, 98_304, 200_000])
def test_long_base64_is_decoded_as_a_whole(num_bytes: int) -> None:
    data = random.Random(num_bytes).randbytes(num_bytes)
    assert decoded(base64.b64encode(data).decode(), ImageRules()) == data


@pytest.mark.parametrize("at", [3, 65_534, 65_535, 65_536, 131_071, 131_072, 199_996])
@pytest.mark.parametrize("wrong", ["=", "==", "-", " ", "\n", "\0", "é"])
def test_wrong_base64_is_refused_wherever_it_is(at: int, wrong: str) -> None:
    """The text is decoded piece by piece. Padding is right only at the end of the last piece."""
    text = "A" * (at - len(wrong) + 1) + wrong
    with pytest.raises(ImageRefused, match="base64"):
        decoded(text + "A" * (200_000 - len(text)), ImageRules())


def test_no_call_of_the_library_takes_long() -> None:
    """A call of the base64 library stops all threads. Decoding 6 MiB at once would stop the event
    loop for some 20 ms.

    The test measures processor time, so that the load of the machine does not matter.
    """
    text = "A" * (8 << 20)
    whole_s = _longest_call_s(lambda: base64.b64decode(text, validate=True))
    assert _longest_call_s(lambda: decoded(text, ImageRules())) < whole_s / 8


def _longest_call_s(work: Callable[[], object]) -> float:
    """The longest call of a C function during `work`, in seconds of processor time."""
    begun_s = longest_s = 0.0

    def on_event(_: FrameType, event: str, __: object) -> None:
        nonlocal begun_s, longest_s
        if event == "c_call":
            begun_s = time.thread_time()
        elif event == "c_return":
            longest_s = max(longest_s, time.thread_time() - begun_s)

    sys.setprofile(on_event)
    try:
        work()
    finally:
        sys.setprofile(None)
    return longest_s

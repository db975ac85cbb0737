"""The CPU that TLS between all processes costs: a mesh with TLS is compared with one without it.

Both meshes run the same code all the time. Each has two gateways, a prefill and a decode on sim.
The second mesh has `--tls`: its gRPC and NATS connections are encrypted, both ends show
certificates, and NATS and Redis give each role its own rights. Clients reach both meshes in plain
text, since the generator has no TLS. Neither mesh encrypts KV, which UCX moves, or Redis, whose
build in the wheel has no TLS (docs/security.md). Connections stay open, so no request includes a
handshake.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Final

from loadtests.gateway.cost import ratios, running
from loadtests.gateway.mesh_cost import NUM_GATEWAYS, Sides, Window, in_turn, table
from loadtests.harness.generator import ROOT
from loadtests.harness.results import Spread, write
from loadtests.peers.cases import CASES, LONE, ONE, STREAMS

ABOUT: Final = (
    "Milliseconds of CPU per request, medians over the rounds; the last column is with / without "
    "TLS of each round, with median (lowest..highest). Both meshes run side by side: two gateways, "
    "a prefill and a decode on sim.\n\n"
    "The figures cover mutual TLS of gRPC between the processes and of NATS, and the roles at NATS "
    "and Redis. They do not cover clients' connections (plain HTTP: the generator has no TLS), KV "
    "over UCX and Redis (neither is encrypted by `--tls`), and handshakes: connections last."
)


def per_token_us(sides: Sides, kind: str = "") -> list[float]:
    """The CPU per further token of a stream in each round.

    It is the CPU of one kind of process, or of all processes if `kind` is empty.
    """

    def cost(window: Window) -> float:
        return window.cpu_ms[kind] if kind else window.total_ms

    pairs = zip(sides[STREAMS.name], sides[ONE.name], strict=True)
    num_more = STREAMS.max_tokens - ONE.max_tokens
    return [1e3 * (cost(stream) - cost(one)) / num_more for stream, one in pairs]


def further_rows(without: Sides, with_tls: Sides) -> str:
    ttft = [[w.ttft_p50_ms for w in sides[LONE.name]] for sides in (without, with_tls)]
    rows: list[tuple[str, list[float], list[float]]] = [
        ("a further token of a stream, us of CPU", per_token_us(without), per_token_us(with_tls)),
        *(
            (f"of these, in {kind}", per_token_us(without, kind), per_token_us(with_tls, kind))
            for kind in ("gateway", "decode")  # the other processes use almost no CPU for a token
        ),
        (f"first token of {LONE.name}, p50, ms", ttft[0], ttft[1]),
    ]
    head = "| | without, median (lowest..highest) | with TLS | with / without |\n|---|---|---|---|"
    lines = [
        f"| {name} | {Spread.of(old).text('.2f')} | {Spread.of(new).text('.2f')} "
        f"| {ratios(old, new).text('.2f')} |"
        for name, old, new in rows
    ]
    return "\n".join([head, *lines])


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench NAME=tls-cost ARGS=", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each case")
    parser.add_argument("--out", type=Path, help="writes OUT.md and OUT.json")
    options = parser.parse_args()
    with (
        running(ROOT, num_gateways=NUM_GATEWAYS) as plain,
        running(ROOT, num_gateways=NUM_GATEWAYS, tls=True) as encrypted,
    ):
        without, with_tls = in_turn((plain, encrypted), CASES, options.rounds, options.seconds)
    names = ("without TLS", "with TLS", "with / without")
    text = f"{table(names, without, with_tls)}\n\n{further_rows(without, with_tls)}"
    text += f"\n\nLoad average at the end: {os.getloadavg()[0]:.1f}, on {os.cpu_count()} cores."
    print(text)
    if options.out is not None:
        title = "What TLS between all processes costs"
        write(options.out, "loadtests.gateway.tls_cost", title, ABOUT, text)


if __name__ == "__main__":
    main()

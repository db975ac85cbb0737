"""The arguments of `pdmesh plan`."""

from __future__ import annotations

from pathlib import Path

from pdmesh.cli import values
from pdmesh.cli.arguments import options
from pdmesh.cli.arguments.options import Commands
from pdmesh.core.sizing.accelerators import ACCELERATORS


def add_plan(commands: Commands) -> None:
    parser = commands.add_parser(
        "plan",
        parents=[options.of_state(), options.of_output()],
        help="compute how many instances a workload needs, with P/D and with fusion",
    )
    add = parser.add_argument
    add(
        "--model",
        required=True,
        help="a folder with config.json, that file itself, or the id of a model in the local "
        "cache of Hugging Face",
    )
    add(
        "--gpu",
        required=True,
        help=f"{', '.join(sorted(ACCELERATORS))}, or custom:bf16_tflops=N,memory_gib=N,"
        "memory_gbs=N; custom:h100,memory_gib=94 changes a known one",
    )
    add(
        "--tp",
        type=values.sizes,
        default=(1, 2, 4, 8),
        metavar="N,M",
        help="numbers of tensor-parallel ranks to choose from, at most 8 (default: 1,2,4,8)",
    )
    add(
        "--scenario",
        type=Path,
        metavar="FILE",
        help="YAML file with values for the next options, under the names in parentheses",
    )
    add("--rate", type=values.positive, metavar="N", help="requests/s (rate_per_s)")
    lengths = "tokens: N, MIN-MAX (uniform) or mean=N,p99=M (lognormal)"
    add("--prompt", metavar="TOKENS", help=f"lengths of prompts, {lengths} (prompt)")
    add("--answer", metavar="TOKENS", help="lengths of answers, likewise (answer)")
    add(
        "--cached",
        type=values.share_or_none,
        metavar="SHARE",
        help="share of each prompt that is cached (cached_share; default: 0)",
    )
    add(
        "--trace",
        metavar="FILE",
        help="lengths and rate from a Mooncake trace or an Azure table instead (trace)",
    )
    add("--ttft", type=values.positive, metavar="SECONDS", help="goal for TTFT (ttft_s)")
    add(
        "--tpot",
        type=values.positive,
        metavar="SECONDS",
        help="goal for the time per further token, a request's mean (tpot_s)",
    )
    add(
        "--share",
        type=values.share,
        metavar="SHARE",
        help="share of the requests that must meet each goal (share; default: 0.99)",
    )
    add(
        "--least",
        type=values.one_or_more,
        default=2,
        metavar="N",
        help="least number of instances of each role (default: 2, so that one may fail)",
    )
    add("--kv-dtype", choices=["auto", "fp8"], default="auto", help="number format of stored KV")
    add(
        "--law",
        metavar="LAW",
        help="a measured law of step times, which replaces the GPU's: a name or a YAML file",
    )
    add(
        "--price",
        type=values.positive,
        metavar="N",
        help="price of one GPU for an hour, in any currency",
    )
    add(
        "--mode",
        choices=["auto", "pd", "fusion"],
        default="auto",
        help="the deployment in the desired state (default: the one with fewer GPUs)",
    )
    add("--desired", action="store_true", help="print only the desired state, for pdmesh apply")
    parser.set_defaults(module="plan")

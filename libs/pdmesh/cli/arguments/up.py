"""The arguments of `pdmesh up`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from pdmesh.cli import values
from pdmesh.cli.arguments import options
from pdmesh.cli.arguments.options import Commands


def add_up(commands: Commands) -> None:
    parser = commands.add_parser(
        "up", parents=[options.of_state()], help="start a mesh on this machine"
    )
    add = parser.add_argument
    add(
        "--engine",
        choices=["vllm", "sim"],
        default="vllm",
        help="the engine that computes tokens (default: vllm)",
    )
    add(
        "--prefill", type=values.count, metavar="N", help="prefill instances (default: 1; 2 on sim)"
    )
    add("--decode", type=values.count, metavar="M", help="decode instances (default: 1; 2 on sim)")
    add(
        "--fusion", action="store_true", help="start one instance for both phases instead of a pair"
    )
    add(
        "--encoder",
        type=values.count,
        default=0,
        metavar="N",
        help="instances that encode images for the prefills",
    )
    add(
        "--pooling",
        type=values.count,
        default=0,
        metavar="N",
        help="instances for embeddings, scores and reranking",
    )
    add(
        "--pooling-model",
        type=Path,
        metavar="DIR",
        help="the Hugging Face model directory of the pooling instances (default: that of "
        "the other instances, under a name that ends in -embed)",
    )
    add(
        "--blank",
        type=values.count,
        default=0,
        metavar="N",
        help="instances whose role the master assigns",
    )
    add(
        "--groups",
        type=Path,
        metavar="FILE",
        help="a desired state to apply; it gives the instances their roles",
    )
    add(
        "--gateways",
        type=values.one_or_more,
        default=1,
        metavar="K",
        help="number of gateways; they share the ports",
    )
    add(
        "--regions",
        metavar="A,B",
        help="start the instances, gateways and masters in each of these regions (default: the "
        "regions in --groups)",
    )
    add(
        "--node-agent",
        action="store_true",
        help="start a node agent, which watches this machine's devices",
    )
    add(
        "--masters",
        type=values.one_or_more,
        default=1,
        metavar="L",
        help="number of masters; all but one are standbys",
    )
    add(
        "--host",
        default="127.0.0.1",
        help="address on which clients reach the gateways (default: %(default)s)",
    )
    add(
        "--inner-host",
        default=os.environ.get("PDMESH_INNER_HOST", "127.0.0.1"),
        metavar="HOST",
        help="address on which the mesh's processes reach each other (default: %(default)s)",
    )
    for port, written, default in (("http", "HTTP", "8000"), ("grpc", "gRPC", "8001")):
        add(
            f"--{port}-port",
            type=values.port,
            default=os.environ.get(f"PDMESH_{port.upper()}_PORT", default),
            metavar="PORT",
            help=f"{written} port of the gateways; 0 picks a free one (default: %(default)s)",
        )
    add("--model", type=Path, metavar="DIR", help="a Hugging Face model directory")
    add("--dtype", choices=["float32", "bfloat16", "float16"], help="number format of the model")
    add(
        "--engine-arg",
        type=values.assignment,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an argument of vLLM's for every instance, e.g. quantization=awq; may be repeated",
    )
    for kind, example in (("tool", "hermes"), ("reasoning", "qwen3")):
        add(
            f"--{kind}-parser",
            metavar="NAME",
            help=f"vLLM's {kind} parser, such as {example}; none: no parser (default: the one that "
            "fits the model's chat template)",
        )
    add(
        "--host-folder",
        type=Path,
        metavar="DIR",
        help="start the part of a multi-host mesh that runs on this host; pdmesh hosts prepare "
        "makes this folder, which says what runs here",
    )
    add(
        "--nats-url",
        default=argparse.SUPPRESS,
        help="use this NATS server instead of starting one",
    )
    add(
        "--redis-url",
        default=os.environ.get("PDMESH_REDIS_URL") or None,
        help="use this Redis or Valkey server instead of starting one",
    )
    add(
        "--keys",
        type=Path,
        metavar="FILE",
        help="require API keys from this file (see pdmesh keys)",
    )
    add("--allow-anonymous", action="store_true", help="admit callers without keys")
    add(
        "--tls",
        action="store_true",
        help="use mutual TLS between the mesh's processes, with an authority of this mesh",
    )
    add(
        "--insecure-network",
        action="store_true",
        help="allow plain text between processes, and to NATS and Redis, on addresses that other "
        "machines can reach",
    )
    add(
        "--timeout",
        type=values.positive,
        default=300.0,
        help="longest wait until the mesh is ready, in seconds",
    )
    add(
        "--detach",
        action="store_true",
        help="return when the mesh is ready; stop it with pdmesh down",
    )

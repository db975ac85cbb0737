"""Runs `vllm bench serve` without vLLM's own command.

This command does not start if vLLM is installed under another package name.
"""

from __future__ import annotations

import argparse

from vllm.benchmarks.serve import add_cli_args, main

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    main(parser.parse_args())

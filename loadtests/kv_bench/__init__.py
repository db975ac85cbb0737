"""Measures the cost of moving a prompt's KV from a sender to a receiver, over tcp and shared
memory.

The product's ways (block-free and per layer) are compared with a transfer block by block, with
UCX's own test, and with other libraries. The sender and the receiver are two processes. `python -m
loadtests.kv_bench --help` shows the options.
"""

"""What moving a prompt's KV costs: block by block, block-free and per layer, compared with UCX's
own test and other libraries.

Two processes, a sender and a receiver, exchange the KV over tcp and over shared memory.
`python -m loadtests.kv_bench --help`.
"""

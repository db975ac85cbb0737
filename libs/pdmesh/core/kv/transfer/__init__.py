"""Both ends of a KV transfer from a prefill to a decode.

The modules decide which instance may pull which KV, how a pull is cut into parts, in which order
pulls run, how long a sender keeps the KV, and which sources are excluded for a while.
"""

"""Both ends of a KV transfer: which instance may pull what, in which order, in parts of which size,
until when, and which sources are excluded for a while.
"""

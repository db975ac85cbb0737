"""Both ends of a KV transfer: which instance may pull what, in which order, until when, and which
sources are excluded for a while.
"""

"""A KV transfer, both ends: which instance may pull what, in which order, until when, and which
sources are excluded for a while.
"""

"""A KV transfer, both ends: who may pull what, in which order, until when, and from whom KV is not
taken for a while.
"""

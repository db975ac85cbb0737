"""One incarnation of an instance: what it should be, how it loads, what it reports of itself, and
how it serves until it deregisters.
"""

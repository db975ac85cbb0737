"""One incarnation of an instance: what it should be, how it loads, what it reports about itself,
and how it serves until it deregisters.
"""

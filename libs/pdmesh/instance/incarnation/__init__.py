"""One incarnation of an instance: its role and settings, the loading of its engine, its registry
record, and its serving until it deregisters.
"""

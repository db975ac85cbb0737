"""Decisions about one instance, which is an engine in one role, and its host.

The modules decide which requests an instance is offered and takes, where their bytes are in memory,
whether the engine still runs, and what an instance does from its start until it serves.
"""

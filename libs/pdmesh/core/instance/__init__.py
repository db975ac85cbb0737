"""Decisions about one instance: an engine that serves one role, and the host around it.

The modules decide which requests an instance is offered and accepts, where their KV is in memory,
whether the engine still runs, and what an instance does from its start to its end.
"""

"""Decisions: pure, synchronous, no I/O, no clock.

Each is state and `handle(event, now) -> effects`.
"""

"""Decisions: pure, synchronous, without I/O or clock: each is state + `handle(event, now) -> effects`."""

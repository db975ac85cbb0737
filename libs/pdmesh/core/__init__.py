"""Decisions: pure, synchronous, without I/O or clock (STYLE.md, 2)."""

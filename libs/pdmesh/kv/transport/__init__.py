"""Moves KV bytes between two processes: the Protocol for it, and its implementation over UCX."""

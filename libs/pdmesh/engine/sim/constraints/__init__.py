"""Constraints in the sim engine: compiled beside its loop, kept to by its draws."""

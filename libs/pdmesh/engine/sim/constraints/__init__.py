"""Constraints in the sim engine: they are compiled beside its loop, and its draws obey them."""

"""Measures how a mesh recovers from faults, and checks that it leaves nothing behind."""

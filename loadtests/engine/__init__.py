"""Measures how an engine spends its time."""

"""Measures placement for thousands of instances: what decisions cost, and how good they are."""

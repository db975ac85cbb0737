"""Decisions for a mesh of thousands of instances: what they cost, and how good they are."""

"""Decisions about pooling, which makes vectors or scores of whole texts: a model's abilities,
truncation, batches, and placement.
"""

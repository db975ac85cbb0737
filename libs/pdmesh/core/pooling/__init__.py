"""Vectors and scores of whole texts: a model's abilities, truncation, batches, and placement."""

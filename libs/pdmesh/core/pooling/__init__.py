"""Vectors and scores of whole texts: what a model can make, its inputs' batches and instances."""

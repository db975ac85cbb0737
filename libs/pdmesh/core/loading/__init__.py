"""Loading of a model's weights: which files in which order, and through which part of one
buffer.
"""

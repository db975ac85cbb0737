"""Vectors and scores of whole texts: what a model can make, which inputs go together, where they
go.
"""

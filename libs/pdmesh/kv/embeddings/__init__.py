"""Embeddings of images between instances: their names, their pool at an encoder, their fetch."""

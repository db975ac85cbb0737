"""Speculation: which tokens a decode proposes, and how many at each batch size."""

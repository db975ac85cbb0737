"""Load tests: what the mesh adds to its engine, how much it carries, and whether its memory stays
flat.
"""

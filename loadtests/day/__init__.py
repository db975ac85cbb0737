"""A compressed day of tides, an upgrade and faults on a mesh of real processes: what is done when,
what the mesh reports about it, and its figure.
"""

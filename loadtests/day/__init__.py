"""A compressed day of tides, an upgrade and faults on a mesh of real processes: what is done when,
what the mesh says of it, and its figure.
"""

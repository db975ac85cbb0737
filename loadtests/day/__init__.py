"""A compressed day on a mesh of real processes, with tides, an upgrade and faults: its plan, the
mesh's reports, and its figure.
"""

"""What the mesh adds to its engine in time and memory, and how much it carries, compared with the
bare engine and other gateways.
"""

"""What the mesh adds to its engine and carries, in time and in memory, beside the bare engine and
other gateways.
"""

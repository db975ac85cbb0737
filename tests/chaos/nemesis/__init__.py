"""The nemesis (F42): random faults and operator's orders, drawn from a seed, on a mesh that serves.

After each step of faults, the invariants of the mesh are checked.
"""

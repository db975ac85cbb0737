"""The seeded nemesis (F42): random faults and operator's orders while a mesh serves, and the
invariants that must hold after each.
"""

"""The seeded nemesis (F42): random faults and random orders of an operator against a mesh that
serves, and what must hold after each.
"""

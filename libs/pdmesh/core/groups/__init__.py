"""Brings groups of instances to the desired state: which instance joins or leaves, in which region,
and when a step has taken too long.
"""

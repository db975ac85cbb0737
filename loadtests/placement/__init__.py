"""Placement and its cost: plans, the index, the age of the master's knowledge, and a comparison of
policies.
"""

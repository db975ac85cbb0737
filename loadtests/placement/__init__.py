"""Placement and its cost: plans, the index, how old its knowledge is, and a comparison of
policies.
"""

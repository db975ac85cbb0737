"""Decides how much each tenant may use over all gateways, and how many tokens an ended call costs.

A tenant is the customer that keys, limits and a priority belong to.
"""

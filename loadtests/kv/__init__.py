"""Measures the cost of moving and keeping KV: single pulls, tiers, and the effect on running
decodes.
"""

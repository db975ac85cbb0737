"""Measures placement (the choice of instances for a request): its cost, and its quality beside
other policies.
"""

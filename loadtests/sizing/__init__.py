"""Checks plans of deployments: their laws against measured kernels, their queues against
simulations.
"""

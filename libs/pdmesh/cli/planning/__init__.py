"""The input and output of `pdmesh plan`.

The command reads a model's folder, a scenario, a trace and a law of step times, and prints a plan.
"""

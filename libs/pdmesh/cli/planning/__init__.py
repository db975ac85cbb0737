"""The input and output of `pdmesh plan`.

The command reads a model's folder, a scenario, a trace and a law, and prints a plan. A law is a
formula for the times of an engine's steps.
"""

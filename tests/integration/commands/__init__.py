"""Tests of `pdmesh` as people use it. Each command runs in a process of its own, on a real mesh of
simulated engines.
"""

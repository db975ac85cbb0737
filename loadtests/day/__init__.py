"""Plays a compressed day on a mesh of real processes, with changing traffic, an upgrade and
faults.
"""

"""Requests as they come in reality: workloads, the loops that send them, and a page on what came
back.
"""

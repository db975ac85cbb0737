"""Compares other serving stacks with ours on one machine: which carries more, and which answers
first.
"""

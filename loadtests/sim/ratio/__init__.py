"""Measures on the virtual clock what the right ratio of prefills to decodes gains, and whether the
ratio loop finds it (`make bench NAME=ratio`).
"""

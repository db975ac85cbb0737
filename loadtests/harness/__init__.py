"""What measurements share: load generators, servers to compare with, processes and their cost,
results as pages, and verdicts in words.
"""

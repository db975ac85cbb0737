"""Checks of the KV path that need a GPU: the operators, the copies beside the model, the draws, and
the transfer of KV over UCX from a cache on a GPU into that of another process.
"""

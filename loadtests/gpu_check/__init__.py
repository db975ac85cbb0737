"""Checks of the KV path that need a GPU.

They cover the operators that gather and scatter KV, copies beside a computing model, checksums,
seeded draws, and the transfer of KV over UCX from the GPU of one process to that of another.
"""

"""Logs, metrics and traces: what an operator sees of a process.

Never a prompt, an output or a key.
"""

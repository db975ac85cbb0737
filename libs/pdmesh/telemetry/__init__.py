"""Logs, metrics and traces of a process, for operators.

They never contain a prompt, an output or a key.
"""

"""Logs, metrics and traces of a process, for operators.

Telemetry never contains a prompt, an output or a key.
"""

"""Starts and stops vLLM's processes, after checks of the settings and of the machine."""

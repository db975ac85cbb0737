"""Runs in the instance's process: turns messages of vLLM and its workers into engine outputs."""

"""Runs in the instance's process: turns outputs of vLLM and its workers into the host's outputs."""

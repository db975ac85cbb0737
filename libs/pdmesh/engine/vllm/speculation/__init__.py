"""Speculation with vLLM: its arguments, fixes of how it draws, and a proposer of our own."""

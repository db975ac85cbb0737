"""Speculation in vLLM: arguments, fixes of vLLM's sampling, and our own proposer of tokens."""

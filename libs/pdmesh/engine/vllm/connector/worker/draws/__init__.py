"""Fixes how vLLM draws, so that several engines draw an answer as a single engine would."""

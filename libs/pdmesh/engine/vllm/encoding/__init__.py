"""Encoder and prefill apart on vLLM: embeddings travel by an ECConnector of our own (S130)."""

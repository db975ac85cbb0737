"""Runs vLLM as an encoder apart from prefill. Our own ECConnector moves the embeddings (S130)."""

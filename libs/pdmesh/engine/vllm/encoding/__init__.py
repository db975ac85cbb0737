"""vLLM as an encoder apart from prefill: our own ECConnector moves the embeddings (S130)."""

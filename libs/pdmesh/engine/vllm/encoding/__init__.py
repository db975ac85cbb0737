"""Runs vLLM as an encoder, which makes image embeddings. Our ECConnector moves them (S130)."""

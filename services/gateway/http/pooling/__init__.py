"""The paths for vectors and scores of texts: OpenAI's embeddings, and vLLM's score and rerank."""

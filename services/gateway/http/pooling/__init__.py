"""The paths for vectors and scores: OpenAI's embeddings, and score and rerank as vLLM has them."""

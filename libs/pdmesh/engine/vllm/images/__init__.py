"""Images in vLLM: how a model represents them, their processing, and the inputs of requests."""

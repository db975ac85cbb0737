"""Images in vLLM: learns how a model represents them, processes them, and makes request inputs."""

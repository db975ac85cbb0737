"""Images in vLLM: how a model takes them, what its processor makes of one, a request's inputs."""

"""Property tests of vLLM's scheduler together with our connector."""

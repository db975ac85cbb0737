"""What runs in vLLM's scheduler: which blocks of a step are gathered, received, loaded, stored."""

"""Starting vLLM: the checks before it, its first thread and its last process."""

"""Starting vLLM: the checks before the start, its first thread and its last process."""

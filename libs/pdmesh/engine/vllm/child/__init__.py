"""Starting vLLM: what is checked before, its first thread and its last process."""

"""In each vLLM worker: what makes an answer drawn by several engines the answer of one."""

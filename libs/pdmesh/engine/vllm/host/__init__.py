"""In the instance's process: jobs, and what outputs of vLLM and its workers mean to the host."""

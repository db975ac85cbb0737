"""In the instance's process: the jobs, what vLLM's outputs and workers mean for them, and what the
host reads.
"""

"""In the instance's process: the jobs, the meaning of vLLM's outputs and workers, the host's
view.
"""

"""Compares reading a model's weights once per node with a reader in each rank (S86, S87, S135).

The ranks are processes that communicate over gloo, without vLLM. `python -m loadtests.loading
--help` shows the options.
"""

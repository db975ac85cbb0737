"""What reading weights once per node gains over a reader in each rank (S86, S87, S135).

`python -m loadtests.loading --help`. The ranks are processes over gloo, without vLLM.
"""

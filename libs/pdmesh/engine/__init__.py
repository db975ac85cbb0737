"""The engines, which compute tokens: vLLM, and the simulated engine (sim).

`base` has their common interface.
"""

"""Our KV connector inside vLLM: the scheduler's half plans each step, the worker's half moves
the KV.
"""

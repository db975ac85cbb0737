"""Our KV connector in vLLM: the scheduler's half plans each step, the worker's half moves KV."""

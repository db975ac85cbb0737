"""The vLLM engine: AsyncLLM in the instance's process, our KV connector in its workers."""

"""The sim engine: a model whose tokens depend on every byte of KV, and whose time is a law."""

"""Runs vLLM as a pooling engine, which makes vectors or scores of whole texts.

No KV leaves the engine, so it has neither a KV connector nor tiers, which would keep KV outside
vLLM.
"""

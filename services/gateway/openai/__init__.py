"""Requests as OpenAI and vLLM word them: structs, bounds, checks, and the call that each becomes.

The other APIs, gRPC among them, translate their requests into these.
"""

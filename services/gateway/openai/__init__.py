"""Requests in the form of OpenAI and vLLM: structs, bounds, checks, and the calls made from them.

The other APIs, including gRPC, translate their requests into these structs.
"""

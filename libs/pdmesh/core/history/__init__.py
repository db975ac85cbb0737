"""The recent past, for operators: answers, KV flows, incidents, events, and the story of a request.

All of it is bounded and kept in memory. No decision uses it.
"""

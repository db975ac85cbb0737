"""What operators see of the last hour: answers by scenario, KV flows, incidents, changes,
and the story of a request. Everything is bounded and in memory; no decision uses it.
"""

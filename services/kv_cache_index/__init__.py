"""The kv-cache-index: knows which KV blocks each instance has in its caches.

Instances publish deltas, which are changes of their blocks. The index follows the deltas, copies
itself to Redis, and answers the gRPC calls Match and Snapshot.
"""

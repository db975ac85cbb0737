"""Which block is where: follows the instances' KV deltas, copies them to Redis, and answers Match
and Snapshot.
"""

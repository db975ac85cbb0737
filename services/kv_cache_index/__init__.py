"""Which block is where: follows the instances' KV deltas, mirrors Redis, answers Match and
Snapshot.
"""

"""What block is where: follows the instances' KV deltas, keeps Redis, answers Match and
Snapshot.
"""

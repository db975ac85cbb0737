"""Users from A to 4A on twelve prefills: on-demand forwarding compared with queues at the
workers.
"""

"""Users on twelve prefills, up to four times as many as the first run has: on-demand forwarding
compared with queues at the workers.
"""

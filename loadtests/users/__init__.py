"""A to 4A users on twelve prefills: on-demand forwarding compared with queues at the workers."""

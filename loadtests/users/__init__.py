"""Users from A to 4A on twelve prefills: on demand against queues at the workers."""

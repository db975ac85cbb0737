"""Which replica leads, when a dead process is started again, and which hung one is killed."""

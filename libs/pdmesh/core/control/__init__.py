"""Which replica leads, when a dead process is started again, and which silent one is killed."""

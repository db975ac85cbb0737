"""Which replica leads, when a process that died is started again, and which silent one is killed."""

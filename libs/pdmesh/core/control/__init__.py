"""Which replica leads, and when a process that died is started again."""

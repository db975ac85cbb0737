"""Decides which replica leads, when a dead process is restarted, and which hung one is killed."""

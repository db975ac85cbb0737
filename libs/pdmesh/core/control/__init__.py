"""Decides which replica of a service leads, when a dead process is restarted, and which hung
process is killed.
"""

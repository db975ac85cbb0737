"""A mesh over several hosts: the file that describes it, a folder for each host, and the servers
that the hosts run together (ADR 0050).
"""

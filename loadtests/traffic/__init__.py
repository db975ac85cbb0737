"""Sends realistic requests: the workloads, the loops that send them, and the reports."""

"""Decides where requests go: follows the fleet and its KV blocks, ranks instances, leads or
waits.
"""

"""Decides where requests go and manages groups. Every master follows the instances.

Only the leader answers gateways and makes changes.
"""

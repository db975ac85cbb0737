"""Decides where requests go. Every master follows the instances, and the leader ranks them."""

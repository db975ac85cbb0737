"""Decides where requests go. Every master follows the instances; the leader ranks them."""

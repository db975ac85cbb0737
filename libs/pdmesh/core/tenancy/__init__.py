"""Decides how much each tenant may use over all gateways, and what an ended call costs it."""

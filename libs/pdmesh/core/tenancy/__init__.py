"""Decides how much each tenant may use over all gateways."""

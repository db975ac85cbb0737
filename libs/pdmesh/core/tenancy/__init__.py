"""What tenants may take, over all gateways, and what was used for whom."""

"""Real proxies as processes in front of gateways."""

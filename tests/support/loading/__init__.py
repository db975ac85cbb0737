"""Weight files, and ranks that load them."""

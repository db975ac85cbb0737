"""Parts that all measurements share."""

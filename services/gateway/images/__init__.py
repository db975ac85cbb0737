"""Images of requests: read or fetched once, checked, hashed, and kept for the request's life."""

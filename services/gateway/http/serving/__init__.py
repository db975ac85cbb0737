"""Admits HTTP requests in the format of any API, and answers them."""

"""Admits requests over HTTP in any format, and answers them."""

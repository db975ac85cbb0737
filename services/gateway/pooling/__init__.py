"""Calls for vectors and scores: split into batches, sent to pooling instances, put together."""

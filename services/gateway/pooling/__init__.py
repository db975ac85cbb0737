"""Calls for vectors and scores, which pooling instances compute in batches."""

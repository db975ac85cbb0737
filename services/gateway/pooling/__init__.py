"""Calls for vectors or scores of texts, which pooling instances compute in batches."""

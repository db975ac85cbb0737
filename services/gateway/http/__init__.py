"""The OpenAI-compatible endpoint: requests parsed and validated, answers written."""

"""The HTTP endpoint: paths and their documents, requests taken in, answers written."""

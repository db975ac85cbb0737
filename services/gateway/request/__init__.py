"""A client's call over HTTP or gRPC, and its choices, which are the answers to its prompts."""

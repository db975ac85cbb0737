"""A client's call over HTTP or gRPC, and its choices (answers). `core.request` decides for each."""

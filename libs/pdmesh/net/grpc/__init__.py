"""gRPC: channels, servers, credentials, and bounds on what strangers send."""

"""gRPC: channels, servers, credentials, and bounds on messages from strangers."""

"""gRPC for the mesh: channels, servers, credentials, and bounds on messages from strangers."""

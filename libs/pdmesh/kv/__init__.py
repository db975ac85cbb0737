"""KV bytes and where they are: transport, transfer agent, index."""

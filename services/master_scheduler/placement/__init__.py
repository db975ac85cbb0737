"""Plans where requests go: the gRPC service, and the feeds that keep its data current."""

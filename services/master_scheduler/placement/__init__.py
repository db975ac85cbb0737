"""Plans of requests: the servicer, and the feeds that keep its view of the fleet current."""

"""Plans of requests: the servicer, and what keeps its picture of the fleet true."""

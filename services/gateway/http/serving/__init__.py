"""A request over HTTP in any format: taken in, and answered."""

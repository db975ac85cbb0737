"""A request over HTTP in any format: taken in, made a chat of, and answered."""

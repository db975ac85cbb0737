"""The dev mesh: every service and server as a child process of one supervising launcher."""

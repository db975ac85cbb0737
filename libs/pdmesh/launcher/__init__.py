"""The dev mesh: one launcher supervises every service and server as a child process."""

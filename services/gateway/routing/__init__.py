"""The gateway's view of the instances and the master, and the streams to both."""

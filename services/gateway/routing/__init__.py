"""This gateway's view of the instances and the master, and its streams to them."""

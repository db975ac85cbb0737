"""The hosts of one mesh as network namespaces, with a network that a test can disturb."""

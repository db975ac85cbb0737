"""Hosts of one mesh as network namespaces, with a network between them that a test can disturb."""

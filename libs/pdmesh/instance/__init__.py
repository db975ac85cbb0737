"""The instance process of all roles: its lives one after the other, and the legs of each life."""

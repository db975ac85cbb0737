"""Rolling upgrades: which group changes next, whether it does well, when all are rolled back."""

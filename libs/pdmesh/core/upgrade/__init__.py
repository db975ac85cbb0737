"""Rolling upgrades: which group gets the new revision next, how it does, and when it rolls back."""

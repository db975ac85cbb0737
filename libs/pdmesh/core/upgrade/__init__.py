"""Rolling upgrades: which group gets the new revision next, how it does, when it is rolled back."""

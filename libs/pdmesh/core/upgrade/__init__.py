"""Rolling upgrades: which group gets the new revision next, whether it does well, and when it goes back."""

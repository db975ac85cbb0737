"""Rolling upgrades: groups get a new revision one after another. A bad revision is rolled back."""

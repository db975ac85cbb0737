"""Rolling upgrades: groups get a new revision one after another. A bad one is rolled back."""

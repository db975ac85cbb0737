"""Groups of instances: the loop that reconciles them with the desired state, and its data."""

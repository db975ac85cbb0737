"""Groups: the loop that reconciles them with the desired state, and its input and output."""

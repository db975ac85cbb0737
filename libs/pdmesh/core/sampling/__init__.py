"""What a request says of how its tokens are drawn, and which text ends its answer."""

"""What a request says about how its tokens are drawn, and which text ends its answer."""

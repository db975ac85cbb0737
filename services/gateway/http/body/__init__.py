"""The JSON that clients send: parsed within bounds, with the wrong field named."""

"""Anthropic's Messages API, as another format of a chat."""

"""Finds reasoning and tool calls in answers, with vLLM's parsers in a separate process."""

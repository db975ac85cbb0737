"""Reasoning and tool calls within an answer: found by vLLM's parsers, in a process of their own."""

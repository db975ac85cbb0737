"""What a step of vLLM does, over our connector: tests of the engine without services."""

"""What `pdmesh plan` reads and prints: a model's folder, a scenario, a trace, an engine's law."""

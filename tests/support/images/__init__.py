"""Images for tests: files, fakes of vLLM's processing, and a wait for encoders."""

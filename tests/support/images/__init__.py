"""Image files for tests."""

"""What several tests need to set up the world."""

"""Judges which processes are alive and which instances are faulty, and announces changes."""

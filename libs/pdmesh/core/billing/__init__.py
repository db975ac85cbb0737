"""Counts how long instances were used, and decides which account is charged for each instance."""

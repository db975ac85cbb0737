"""Turns the measured rows into figures, bars, pages and plots."""

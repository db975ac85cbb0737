"""Tests of tools/audit."""

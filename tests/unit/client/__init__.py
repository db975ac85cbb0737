"""Tests of pdmesh.client."""

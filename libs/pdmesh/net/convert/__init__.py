"""Conversions between protobuf messages and types of the core that several services need."""

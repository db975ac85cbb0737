"""One package per service; services talk through `proto/` only, never by importing each other."""

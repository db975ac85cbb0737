"""pdmesh: prefill and decode on different instances, as an event-driven mesh."""

__version__ = "0.1.0"

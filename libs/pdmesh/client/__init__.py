"""The Python client for programs that operate a mesh: it reads state and events, and makes changes.

Programs begin with `Client` (docs/python-client.md). The `pdmesh` commands use this package's
functions directly.
"""

from pdmesh.client.client import Client
from pdmesh.client.events import MeshEvent
from pdmesh.client.look import MeshLook

__all__ = ["Client", "MeshEvent", "MeshLook"]

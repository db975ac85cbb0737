"""The typed client for programs that operate a mesh: its state, its changes, its events.

`Client` (docs/python-client.md) connects by itself. `pdmesh`'s commands use the parts.
"""

from pdmesh.client.client import Client
from pdmesh.client.events import MeshEvent
from pdmesh.client.look import MeshLook

__all__ = ["Client", "MeshEvent", "MeshLook"]

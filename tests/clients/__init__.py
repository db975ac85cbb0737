"""Programs that use the mesh through other client libraries.

A test runs each program with a Python that has these libraries. `run URL` prints one JSON object.
"""

"""The HTTP server of gateways and operators' endpoints: uvicorn with bounds on clients' input."""

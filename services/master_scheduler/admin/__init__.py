"""AdminService, the gRPC API for operators, and the operators' web page."""

"""AdminService and the operators' page."""

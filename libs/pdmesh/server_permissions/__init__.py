"""What each role may do at the servers of NATS and Redis: one table, and files for the servers
(ADR 0044). Who a client or an operator is, and what they may ask of the mesh, is in `core/access`.
"""

"""The dev mesh: every service and server as child processes of one launcher that supervises
them.
"""

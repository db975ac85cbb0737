"""Plans of deployments, checked: their laws against measured kernels, their queues against the
virtual mesh.
"""

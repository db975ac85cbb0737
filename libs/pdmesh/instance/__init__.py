"""The process that serves as an instance, in any role: its start, its registration, its requests.

An instance has one engine. A leg is a request's stay on one instance.
"""

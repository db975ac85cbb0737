"""The legs of an instance.

A leg is a request's stay on the instance, from a gateway's command to the last token.
"""

"""Where requests go: keeps a picture of the fleet and of its KV blocks, ranks instances,
leads or stands by.
"""

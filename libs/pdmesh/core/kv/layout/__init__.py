"""What KV looks like: where each piece lies in the buffer, which heads a rank needs, and which
engines may exchange KV.
"""

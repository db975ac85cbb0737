"""The layout of KV: where each piece lies in a buffer, which rank needs which heads, and which
engines may exchange KV.
"""

"""The programs that move KV in a comparison: the product, block-by-block baselines, other
libraries.
"""

"""What faults cost, and whether anything is left behind: recovery step by step, and
the leak test.
"""

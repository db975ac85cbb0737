"""Programs that generate committed files, and programs that check the repository.

`make docs` runs most of the generators.
"""

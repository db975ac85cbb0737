"""Which model a folder holds, by the content of its files."""

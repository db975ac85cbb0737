"""How commands show things: tables, log lines, progress, and JSON or YAML for programs."""

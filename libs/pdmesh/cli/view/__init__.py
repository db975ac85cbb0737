"""The output of commands: tables, log lines, progress, and JSON or YAML for programs."""

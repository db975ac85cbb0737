"""How commands show things: tables, lines of logs, progress, forms for programs."""

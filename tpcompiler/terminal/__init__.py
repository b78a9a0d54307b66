"""What reaches a terminal: text, tables, progress."""

"""Terminal output: text, tables, progress."""

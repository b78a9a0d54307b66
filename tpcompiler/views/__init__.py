"""Pictures and tables of programs."""

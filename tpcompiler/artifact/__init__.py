"""The records of an artifact and their writer."""

"""What an artifact records, and how it is written."""

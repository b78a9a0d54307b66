"""The search for placements: a problem of discrete choices with prices, and an exact solver of it."""

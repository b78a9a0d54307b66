"""What a conversion did, why, and what would be cheaper."""

"""Judges of rules, by brute force on small shards."""

"""Preparation of exported programs for the rules: parts of `canonicalize`, and refusals of unsupported programs."""

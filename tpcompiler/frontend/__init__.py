"""What an exported program needs before the rules can read it: parts of `canonicalize`, and what is refused."""

"""What a program costs on the wire."""

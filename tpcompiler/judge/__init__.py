"""Judges of what the compiler made, which know none of its passes."""

"""Passes that write a part of a program in other ops, where ranks can then do less.

Each file finds such parts and has torch code that computes the same (`tpcompiler/ir/region.py`).
"""

"""Answers about a program: its result, the reasons and cheaper alternatives, as tables and pictures."""

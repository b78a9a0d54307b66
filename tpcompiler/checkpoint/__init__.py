"""Checkpoints: what safetensors files hold, which of it a program takes, and its shares for the ranks."""

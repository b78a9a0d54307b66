"""Checkpoints: the tensors of safetensors files, their match with a program's, and each rank's shares."""

"""The runtime of a deployment: the manifest and the loader. Imports nothing of the compiler."""

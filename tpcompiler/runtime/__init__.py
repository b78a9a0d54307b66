"""What a deployment needs: the manifest and the loader. Imports nothing of the compiler."""

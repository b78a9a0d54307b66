"""The nouns: mesh, placements, sharding, the stage types, graph edits, and the one printer."""

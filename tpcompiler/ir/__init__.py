"""The compiler's nouns: mesh, placements, sharding, the stage types, graph edits, and the text form."""

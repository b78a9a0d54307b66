"""Plans: the layers and parameters that a user wants sharded, each with a style. A dict, or a YAML or JSON file."""

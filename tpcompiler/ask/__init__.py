"""Questions about a conversion: its result, the reasons, and cheaper alternatives."""

"""Which plan to use: candidates, what bounds them, and a search that explains its choice."""

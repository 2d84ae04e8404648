"""For those who test planners of their own: Hypothesis strategies for legal problems and plans."""

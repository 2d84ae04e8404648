"""The machine at hand: which cluster the ranks make, a measurement of it, and cost-based plans for it."""

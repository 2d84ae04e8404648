"""Choices: pure functions that return plans. Reading order: costs, greedy, mesh, attention2d, ulysses, registry."""

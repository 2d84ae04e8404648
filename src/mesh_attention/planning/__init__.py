"""Choices: pure functions that return plans. Reading order: choice, costs, greedy, mesh, attention2d, registry."""

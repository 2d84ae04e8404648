"""Choices: pure functions that return plans.

Reading order: choice, costs, order, greedy, priced, methods, waves, registry.
"""

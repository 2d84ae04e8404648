"""Choices, and the pure functions that turn them into plans.

Reading order: choice, costs, order, greedy, priced, waves, planners.
"""

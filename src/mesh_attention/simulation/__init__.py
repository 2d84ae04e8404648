"""Forecasts of plans on described clusters: simulators of two kinds of plans, and what they share."""

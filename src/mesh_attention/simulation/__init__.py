"""Forecasts of plans on described clusters: simulators of three kinds of plans, and what they share."""

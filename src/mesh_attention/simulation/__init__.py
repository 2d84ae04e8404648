"""Forecasts of plans on described clusters: one simulator of any plan, and a faster one of uniform plans."""

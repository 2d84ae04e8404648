"""Forecasts of plans on described clusters: jobs of ranks, lanes of links, and simulators of three kinds of plans."""

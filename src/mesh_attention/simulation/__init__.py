"""Forecasts of plans on described clusters: prices of steps, lanes of links, and two engines that agree."""

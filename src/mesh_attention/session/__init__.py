"""All talk between the ranks of a group, besides the tensors of a plan: agreement, errors, pass ids, the watchdog."""

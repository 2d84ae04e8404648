"""All talk between the ranks of a group, besides the tensors of a plan: agreement, errors, call ids, the watchdog."""

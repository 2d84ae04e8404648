"""The parts of `train_recall.py`: the task, checkpoints, command-line flags and the progress display."""

"""What `train_recall.py` is made of: the task, the model, checkpoints, flags and what is shown."""

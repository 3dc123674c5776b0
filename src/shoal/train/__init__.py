"""The training step, and Lightning around it."""

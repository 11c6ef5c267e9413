"""Studies of trained models that a paper shows in a figure or table."""

"""Studies of trained models that reproduce a paper's figure or table."""

"""A model's weights in files that other programs read."""

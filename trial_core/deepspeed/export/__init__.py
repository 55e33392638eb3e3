"""A checkpoint's weights as one file."""

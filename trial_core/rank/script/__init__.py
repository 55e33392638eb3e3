"""A user's script that trains by itself: its driver's process and its errors."""

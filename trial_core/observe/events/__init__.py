"""A run's events, for its observers, and the measurements made from them."""

"""A run's events, for whoever observes it, and what is measured from them."""

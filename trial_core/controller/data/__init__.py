"""A rank's data: loaders, validation set, position and random numbers of the data."""

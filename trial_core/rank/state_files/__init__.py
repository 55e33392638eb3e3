"""The files of a rank's state: written, read and checked."""

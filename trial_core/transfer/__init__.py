"""A checkpoint's bytes on their way: snapshots in memory, the persister process, verified reads."""

"""A process's resources on its machine: folders, memory, accelerators, child processes."""

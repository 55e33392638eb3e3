"""What a process has on its machine: folders, memory, accelerators, children."""

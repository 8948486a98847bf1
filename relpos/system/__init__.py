"""What touches the machine: atomic files, locks, child processes, progress lines, memory, versions."""

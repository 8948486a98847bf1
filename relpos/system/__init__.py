"""What touches the machine: files written atomically, locks, progress lines, memory, versions."""

"""Is a function right that is not ours? It is checked in a process of its own (`ferryman check --kernel`)."""

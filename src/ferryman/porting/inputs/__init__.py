"""What is an op tried with? Cases, what fills them, and what fuzzing draws."""

"""Ferryman inside other people's model code. Each module needs its library, and is imported by name only."""

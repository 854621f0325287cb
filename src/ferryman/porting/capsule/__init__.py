"""Evidence that travels: recorded on one machine, replayed on another, compared (docs/capsules.md)."""

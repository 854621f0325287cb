"""Is it right here, and how fast against the limit? One room a question (ARCHITECTURE.md, "Evidence")."""

"""Is one cell right? The oracle, the gates, the measures that they read, and the document of what they found."""

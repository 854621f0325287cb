"""Normalisation of a sample's channels in groups, over all places; then a weight and a bias for each channel."""

"""Porting a model by what it computes: roles proposed from structure, proven, put in place, and accounted for."""

"""What `benchmarks/regret.py` is made of."""

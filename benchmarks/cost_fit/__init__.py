"""How `benchmarks/fit_costs.py` fits the cost model: what was measured, what fits it, and how good its choices are."""

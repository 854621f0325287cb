"""A check, a benchmark or a tuning over many processes and machines, with Ray (extra ``fleet``; docs/fleet.md)."""

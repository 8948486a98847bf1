"""The CABLE paper: its tables as recipes that run and are verified, and its figures."""

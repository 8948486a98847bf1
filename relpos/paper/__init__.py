"""The figures of the CABLE paper: a recipe that trains what is missing, draws it, and writes one page."""

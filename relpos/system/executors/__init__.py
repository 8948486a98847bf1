"""Where the parts of a large job run: processes of this machine, a Ray cluster, or SLURM, behind one interface."""

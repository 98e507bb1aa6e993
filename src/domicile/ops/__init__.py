"""What operators use: the command line and what it shows. Imported by nothing else."""

"""What a person sees of a run: live progress, the line of each iteration, the run's report."""

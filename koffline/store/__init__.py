"""What lies on disk: files that appear whole, folders of runs and their records, where results may go."""

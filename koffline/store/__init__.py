"""Files on disk: atomic writing, folders of runs and their records, checks of output paths."""

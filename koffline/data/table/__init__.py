"""Tables as people keep them (Parquet, Arrow, CSV): columns by name in, transitions out."""

"""Files from strangers: what is checked before a single byte of their content is believed (SECURITY.md)."""

"""Untrusted files: checks before any of their content is used (SECURITY.md)."""

"""Configuration of a run: its schema, its resolution, and hints for misspelt settings."""
